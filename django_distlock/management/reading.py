"""Input of commands, alike from a command line and from `call_command()`; and their output."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

from django.core.management.base import BaseCommand, CommandParser, OutputWrapper

from ..core.durations import LONGEST, number, whole_number
from ..core.errors import InvalidArgument

T = TypeVar("T")


class Printer(OutputWrapper):
    """A printer that escapes each letter of a key that the encoding of the terminal lacks.

    A text that cannot be printed does not stop a command in the middle of its work: the reader has
    ended, as with `| head`, the disk is full, or `2>&-` has closed the stream.

    Attributes:
        failure: Why output is missing that a reader may look for; None: nothing is missing.
    """

    failure: OSError | None = None

    @classmethod
    def instead_of(cls, wrapper: OutputWrapper) -> Self:
        """Return a printer to the same stream, in the same style."""
        printer = cls(wrapper._out)  # type: ignore[arg-type]
        printer.style_func = wrapper.style_func
        return printer

    def write(  # type: ignore[override]
        self, msg: str = "", style_func: Any = None, ending: str | None = None
    ) -> None:
        """Print a text."""
        if self._out is None:
            return
        encoding = getattr(self._out, "encoding", None) or "utf-8"
        text = msg.encode(encoding, "backslashreplace").decode(encoding)
        with self._unread():
            super().write(text, style_func, ending)

    def flush(self) -> None:
        """Print the texts that are still buffered."""
        with self._unread():
            super().flush()

    @contextmanager
    def _unread(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.failure = error
            # The interpreter writes buffered texts at its end, which would fail as well.
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())  # type: ignore[attr-defined]


class ReadingCommand(BaseCommand):
    """A command whose options obey the same rules if they come as keyword arguments.

    Django passes keyword arguments to the command as they are, without the parser.
    """

    _parser: CommandParser | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stdout = Printer.instead_of(self.stdout)
        self.stderr = Printer.instead_of(self.stderr)

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Keep the parser."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        self._parser = parser
        return parser

    def execute(self, *args: Any, **options: Any) -> Any:
        """Run with the options as the parser reads them."""
        if self._parser is not None and not self._parser.called_from_command_line:
            options |= _read(self._parser, options)
        return super().execute(*args, **options)


def number_of(value: str | timedelta, unit: timedelta = timedelta(seconds=1)) -> float:
    """Return the number in a text, or of units in a `timedelta`; `ValueError`: it is no number."""
    return value / unit if isinstance(value, timedelta) else float(value)


def reader(read: Callable[[Any], T], right: str = "") -> Callable[[Any], T]:
    """Return a reader of numbers on a command line. Its error says `right`; "": its own text."""

    # Its name is for people: argparse says "invalid number value" of what is no number at all.
    def number(text: Any) -> T:
        try:
            return read(text)
        except ValueError as error:
            if not right and not isinstance(error, InvalidArgument):
                raise
            said = f"{text!r} is not {right}." if right else str(error)
            raise argparse.ArgumentTypeError(said) from None

    return number


def between(least: float, most: float, unit: str) -> Callable[[str | timedelta], float]:
    """Return a reader of numbers within bounds on a command line, in a unit of a `timedelta`."""
    one = timedelta(**{unit: 1})
    return reader(
        lambda text: number(number_of(text, one), unit, minimum=least, maximum=most),
        f"a number of {unit} from {least:g} to {most:g}",
    )


def up_to(most: int) -> Callable[[str], int]:
    """Return a reader of whole numbers, from 1 on, on a command line."""
    return reader(
        lambda text: whole_number(int(text) if text.isdecimal() else text, "N", most),
        f"a number from 1 to {most}",
    )


#: Reads a number of seconds from a command line.
duration = between(0.0, LONGEST, "seconds")


def add_backend(parser: CommandParser) -> None:
    """Add the option for the alias of one backend."""
    parser.add_argument(
        "--backend",
        default="default",
        metavar="ALIAS",
        help="an alias of DISTLOCK (default: %(default)s)",
    )


def _read(parser: argparse.ArgumentParser, options: Mapping[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for action in parser._actions:
        value: Any = options.get(action.dest)
        if isinstance(action, argparse._SubParsersAction):
            read |= _read(action.choices[value], options)
        elif value is None or value is action.default or action.nargs == 0:
            continue
        elif isinstance(action, argparse._AppendAction):
            several = [value] if isinstance(value, str) else value
            read[action.dest] = [_as_typed(parser, action, each) for each in several]
        else:
            read[action.dest] = _as_typed(parser, action, value)
    return read


def _as_typed(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    try:
        if action.type is not None:
            given: Any = value if isinstance(value, timedelta) else str(value)
            value = parser._get_value(action, given)
        parser._check_value(action, value)
    except argparse.ArgumentError as error:
        parser.error(str(error))
    return value
