"""What the benchmarks of waiting rest on: who takes part, what is counted, and what counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from django_distlock.backends.lua import script
from django_distlock.conf import table
from tests.benchmarks import fairness, handoff
from tests.benchmarks.clients import hired
from tests.benchmarks.fairness import DONE, LATE, Turns
from tests.benchmarks.proxy import PostgresReader, RedisReader
from tests.benchmarks.waiting import command_kind, statement_kinds


def message(kind: bytes, body: bytes) -> bytes:
    """Return a message as PostgreSQL's protocol has it."""
    return kind + (len(body) + 4).to_bytes(4) + body


def in_pieces(data: bytes, size: int) -> list[bytes]:
    """Cut what is sent, as a network may."""
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_texts_of_statements_are_read(size: int) -> None:
    """Of simple queries, and of each execution of one that was parsed before."""
    said: list[str] = []
    sent = (
        message(b"", b"\0\3\0\0user\0me\0\0")
        + message(b"Q", b"BEGIN\0")
        + message(b"P", b"name\0SELECT $1\0\0\0")
        + message(b"B", b"\0name\0\0\0")
        + 2 * message(b"E", b"\0\0\0\0\0")
        + message(b"S", b"")
    )
    reader = PostgresReader(said)
    assert sum(reader.statements(piece) for piece in in_pieces(sent, size)) == 3
    assert said == ["BEGIN", "SELECT $1", "SELECT $1"]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_words_of_commands_are_read(size: int) -> None:
    """Also of those that contain what looks like a command, or nothing."""
    commands = [[b"PING"], [b"SET", b"key", b"*1\r\n$4\r\nPING\r\n"], [b"GET", b""]]
    sent = b"".join(
        b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        for words in commands
    )
    said: list[list[bytes]] = []
    reader = RedisReader(said)
    assert sum(reader.statements(piece) for piece in in_pieces(sent, size)) == 3
    assert said == commands


def test_transaction_is_of_the_kind_of_what_is_done_in_it() -> None:
    """Its beginning, its settings and its end belong to the note that it writes."""
    note = f'INSERT INTO "{table("waiters")}" VALUES (1)'
    statements = {
        'SELECT "django_distlock_heldlock_acquire_v3"(1)': "attempt",
        "SELECT pg_backend_pid()": "listen",
        'LISTEN "django_distlock_heldlock"': "listen",
        "SELECT set_config('TimeZone', 'UTC', false)": "other",
        "BEGIN": "note",
        "SET TRANSACTION ISOLATION LEVEL READ COMMITTED": "note",
        note: "note",
        # By the listener, meanwhile.
        "SELECT 1": "ping",
        "COMMIT": "note",
        "SELECT 2": "other",
    }
    assert statement_kinds([*statements]) == [*statements.values()]
    assert statement_kinds(["BEGIN", "SELECT 2", "COMMIT"]) == ["other"] * 3


def test_scripts_are_told_by_digest_and_by_text() -> None:
    """A server that does not know one gets it whole."""
    for name, kind in (("acquire", "attempt"), ("note_waiter", "note"), ("release", "other")):
        made = script(name)
        assert command_kind([b"EVALSHA", made.digest.encode(), b"1"]) == kind
        assert command_kind([b"EVAL", made.text.encode(), b"1"]) == kind
    assert [command_kind([name]) for name in (b"ping", b"SUBSCRIBE", b"ZREM", b"HELLO")] == [
        "ping", "listen", "note", "other",
    ]  # fmt: skip


def test_partner_is_another_process_and_tells_what_went_wrong() -> None:
    """It makes one call after the other, and its end is noticed."""
    with hired() as (partner,):
        partner.begin(os.getpid)
        assert partner.result() not in (os.getpid(), None)
        partner.begin(int, "no number")
        with pytest.raises(RuntimeError, match="ValueError.*no number"):
            partner.result()
        partner.begin(os._exit, 0)
        with pytest.raises(RuntimeError, match="has ended"):
            partner.result()


class Script:
    """Both sides of a hand-over, which write down what they are told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def take(self, key: str) -> None:
        """See `Side`."""
        self.said.append(f"take {key}")

    def wait(self, key: str) -> None:
        """See `Side`."""
        self.said.append(f"wait {key}")

    def release(self) -> None:
        """See `Side`."""
        self.said.append("release")

    def has_waiter(self) -> bool:
        """Say so the second time."""
        self.said.append("look")
        return self.said.count("look") > 1

    def begin(self, function: Callable[..., object], *arguments: Any) -> None:
        """See `Partner`."""
        self.said.append(f"{function.__name__} {arguments}")

    def result(self) -> int:
        """See `Partner`."""
        self.said.append("granted")
        return time.monotonic_ns()


def test_key_is_released_when_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not sooner, and a pause behind; the time counts from just before the release."""
    sides: Any = Script()
    monkeypatch.setattr(handoff, "_pause", lambda: sides.said.append("pause") or 0.05)
    began = time.monotonic_ns()
    taken = handoff._between_processes(sides, sides, "name", "key")
    assert sides.said == [
        "take key", "wait_once ('name', 'key')", "look", "look", "pause", "release", "granted",
    ]  # fmt: skip
    assert 0 < taken <= time.monotonic_ns() - began - 50_000_000


def test_turns_count_that_end_in_time() -> None:
    """The first one warms up, and its time does not count; who is alone at the end is late."""
    side: Any = Script()
    turns = Turns(side, 0.0)
    assert [turns(), turns(), turns()] == [DONE, LATE, LATE]
    assert Turns(side, 60)() == DONE
    generous = Turns(side, 60)
    assert [generous(), generous()] == [DONE, DONE]
    assert side.said[:2] == ["wait invoice:hot", "release"]


def test_fairness_is_that_of_the_least_lucky() -> None:
    """Of each round by itself: somebody else may be unlucky in the next one."""
    figure = fairness._figure([[0, 10, 20], [10, 10, 10], [5, 10, 15]])
    assert figure["least_to_mean"] == 0.5
    assert (figure["least"], figure["median"], figure["most"], figure["mean"]) == (5, 10, 15, 10)
    assert figure["total"] == 30
    assert fairness._target("ours", 0.5)["met"]
    assert not fairness._target("ours", 0.49)["met"]
    # Nobody had a turn: nothing is fair about that.
    assert fairness._figure([[0, 0], [0, 0]])["least_to_mean"] == 0
