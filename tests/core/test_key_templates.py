"""Keys from the arguments of a call."""

from __future__ import annotations

import datetime
import decimal
import enum
import itertools
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from django_distlock.core.errors import InvalidArgument
from django_distlock.core.keys import KeyTemplate

DAY = datetime.date(2026, 3, 4)
ID = uuid.UUID("12345678123456781234567812345678")


class Colour(enum.Enum):
    """Members with values of several types."""

    RED = "red"
    SEVEN = 7
    PAIR = (1, 2)


@dataclass
class Invoice:
    """An argument that has no canonical text itself."""

    pk: int
    lines: list[str]


def charge(invoice_id: Any, *, currency: Any = "EUR") -> None:
    """Take arguments by position and by name, with a default."""


def pair(a: Any, b: Any = "b") -> None:
    """Take two."""


def anything(*args: Any, **kwargs: Any) -> None:
    """Take everything."""


def render(template: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Make the key of one call."""
    return KeyTemplate.for_function(template, function).render(args, kwargs)


def test_positional_and_keyword_arguments_make_the_same_key() -> None:
    """`f(1)` and `f(a=1)` are one lock; a default takes part; a template may be a plain key."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((1, 2), {}), ((), {"b": 2, "a": 1})]
    for args, kwargs in [*calls, ((1,), {"b": 2})]:
        assert render("p:{a}:{b}", pair, *args, **kwargs) == "p:1:2"
    for currency in ({}, {"currency": "EUR"}):
        assert render("charge:{invoice_id}:{currency}", charge, 42, **currency) == "charge:42:EUR"
    assert render("nightly", pair, 1) == render("nightly", pair, 2) == "nightly"


def test_fields_follow_attributes_items_and_formats() -> None:
    """A field may be an attribute or an item, and take a format; literal braces are doubled."""
    made = {
        "{a.pk}": "7",
        "{a.lines[1]}": "second",
        "{b[name]}": "Ada",
        "{a.pk:05d}": "00007",
        "{b[day]:%Y-%m}": "2026-03",
        "invoice:{a.pk}!": "invoice:7!",
        "{{{a.pk}}}": "{7}",
        "{{}}": "{}",
        "{{a}}:{a.pk}": "{a}:7",
    }
    values = Invoice(7, ["first", "second"]), {"name": "Ada", "day": DAY}
    assert {template: render(template, pair, *values) for template in made} == made


def test_collected_arguments_are_fields_too() -> None:
    """`*args` and `**kwargs` are reached by item, and a method's object as any argument."""

    def pay(self: Any, amount: int) -> None:
        """Pay."""

    assert render("{args[0]}:{kwargs[name]}", anything, 5, name="x") == "5:x"
    assert render("pay:{self.pk}:{amount}", pay, SimpleNamespace(pk=5), 10) == "pay:5:10"


def test_types_with_canonical_text() -> None:
    """Text, numbers, UUIDs, dates, times and enumerations of them are legal values."""
    for value, text in (
        ("text", "text"),
        (7, "7"),
        (True, "True"),
        (0.5, "0.5"),
        (decimal.Decimal("1.50"), "1.50"),
        (ID, "12345678-1234-5678-1234-567812345678"),
        (DAY, "2026-03-04"),
        (datetime.datetime(2026, 3, 4, 5, 6, tzinfo=datetime.UTC), "2026-03-04 05:06:00+00:00"),
        (datetime.time(5, 6), "05:06:00"),
        (Colour.RED, "red"),
        (Colour.SEVEN, "7"),
        ("e\u0301", "\u00e9"),
    ):
        assert render("{a}", pair, value) == text


def test_value_without_canonical_text_is_refused() -> None:
    """What prints differently from run to run makes no key; the message says what to do."""
    told = r"\{a\} in .*'x:\{a\}'.* has no canonical text. Use an attribute"
    values = [[1], {"a": 1}, {1}, (1,), b"bytes", Invoice(1, []), object(), Colour.PAIR, 1j]
    for value in values:
        with pytest.raises(InvalidArgument, match=told):
            render("x:{a}", pair, value)


def test_none_is_refused() -> None:
    """What is missing names nothing: all calls that lack it would share one lock."""
    with pytest.raises(InvalidArgument, match=r"\{a\} in the key template 'x:\{a\}' is None"):
        render("x:{a}", pair, None)


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        ("{c}", r"names 'c', which is not a parameter of pair\(a: "),
        ("{}", r"names ''.* Write literal braces twice: \{\{ \}\}"),
        ("{0}", "names '0'.* twice"),
        ('{"x": {a}}', "names '\"x\"'.* twice"),
        ("{c.pk}", "names 'c'"),
        ("{c[0]}", "names 'c'"),
        ("{a}{b}", r"needs a separator before \{b\}"),
        ("x{a}{b}y", r"needs a separator before \{b\}"),
        ("{a!r}", "has the conversion !r"),
        ("{a", "expected '}'"),
        ("a}", "Single '}'"),
        ("{a}:{", "Single '{'"),
    ],
)
def test_bad_template_is_refused_before_any_call(template: str, rule: str) -> None:
    """An unknown parameter, a missing separator or a slip of syntax fails at decoration."""
    with pytest.raises(InvalidArgument, match=rule) as caught:
        KeyTemplate.for_function(template, pair)
    assert repr(template) in str(caught.value)


def test_collected_argument_is_named_by_what_collects_it() -> None:
    """Who names it like a parameter is told how."""

    def view(request: object, **kwargs: object) -> None: ...

    with pytest.raises(InvalidArgument, match=r"Write \{kwargs\[pk\]\} for one of \*\*kwargs\."):
        KeyTemplate.for_function("invoice:{pk}", view)


def test_annotation_that_only_a_type_checker_knows_is_not_asked_for() -> None:
    """Python 3.14 and newer evaluate it then; older ones need it where the function is defined."""
    later = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    names: dict[str, Any] = {}
    code = compile(f"{later}def pay(order: Order): ...", __name__, "exec", dont_inherit=True)
    exec(code, names)
    assert render("order:{order}", names["pay"], 7) == "order:7"


def test_arguments_that_do_not_fit_are_pythons_own_error() -> None:
    """A call that Python would refuse is refused as Python does."""
    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        render("{a}", pair)


@pytest.mark.parametrize(
    ("template", "value", "rule"),
    [
        ("{a}", "", "must not be empty"),
        ("{a}", "\0", "NUL"),
        ("{a}", "x" * 513, "at most 512 bytes"),
        ("x:{a:d}", "text", "a:d"),
    ],
)
def test_made_key_follows_the_rules_of_keys(template: str, value: str, rule: str) -> None:
    """A key made of arguments is checked like any other, and so is a format for its value."""
    with pytest.raises(InvalidArgument, match=rule):
        render(template, pair, value)


def test_separators_inside_values_are_escaped() -> None:
    """With two fields, what separates them is percent-encoded inside values; one is readable."""
    assert render("path:{a}", pair, "a:b/c%d") == "path:a:b/c%d"
    assert render("{a}:{b}", pair, "1:2", "3") == "1%3A2:3"
    assert render("{a}:{b}", pair, "1", "2:3") == "1:2%3A3"
    assert render("{a} → {b}", pair, "x→", "y z") == "x%E2%86%92 → y%20z"
    assert render("<{a}:{b}>", pair, "<1>", "2") == "<<1>:2>"


PIECES = ["", "a", ":", "%", "%3A", "3A", "25", "=", "\u0338", "≠", "-", "3"]


TEMPLATES = ["{a}:{b}", "x{a}:{b}y", "{a}::{b}", "{a}:-{b}", "{a}%{b}"]
TEMPLATES += ["{a}%25{b}", "{a}3{b}", "{a}={b}", "{a}-{b}", "%{a}:{b}%"]


def test_different_arguments_never_make_one_key() -> None:
    """Joining never makes one key of two different pairs of values."""
    values = ["".join(both) for both in itertools.product(PIECES, repeat=2)]
    # Values that NFC calls the same are the same value.
    pairs = list(itertools.product(sorted({render("-{a}", pair, v)[1:] for v in values}), repeat=2))
    for template in TEMPLATES:
        made = KeyTemplate.for_function(template, pair)
        keys: dict[str, tuple[str, ...]] = {}
        for each in pairs:
            key = made.render(each, {})
            assert keys.setdefault(key, each) == each, (template, key, keys[key], each)


def test_three_fields_with_two_separators_never_collide() -> None:
    """The separator of one pair of fields is escaped in every value."""

    def three(a: str, b: str, c: str) -> None:
        """Take three."""

    made = KeyTemplate.for_function("{a}:{b}/{c}", three)
    values = ["", "x", ":", "/", "%", ":/", "/:", "x:", "/x", "%2F"]
    keys = {made.render(each, {}) for each in itertools.product(values, repeat=3)}
    assert len(keys) == len(values) ** 3
