"""Who holds a lock, and what the application adds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from django_distlock.core.errors import InvalidArgument
from django_distlock.core.metadata import MAX_METADATA_BYTES, validate_metadata
from django_distlock.core.records import Holder

HOLDER = Holder(
    host="web-1",
    boot_id="b00t",
    process="gunicorn",
    pid=4242,
    started_at=12.5,
    thread="MainThread",
    task_id="task-1",
    metadata={"user": "Ada", "tries": [1, 2.5, None, True, {"deep": "é🔒"}]},
)


@pytest.mark.parametrize("holder", [HOLDER, Holder()])
def test_holder_survives_json(holder: Holder) -> None:
    """What is stored beside a lock reads back as it was, also without what is known to nobody."""
    assert Holder.from_json(json.loads(json.dumps(holder.as_json()))) == holder
    # Workers of two versions read each other's records.
    read = Holder.from_json({"host": "web-1", "region": "eu", "pid": 1})
    assert read == Holder(host="web-1", pid=1)


def test_start_of_a_process_is_a_number() -> None:
    """Whoever asks whether the process is gone calculates with it."""
    for spoiled in ("x", [1], math.nan, 10**400):
        with pytest.raises(InvalidArgument, match="started_at"):
            Holder.from_json({"started_at": spoiled})


def test_json_has_the_pinned_names() -> None:
    """The names are stored, and so cannot change."""
    assert set(HOLDER.as_json()) == {
        "host", "boot_id", "process", "pid", "started_at", "thread", "task_id", "metadata",
    }  # fmt: skip


def test_holder_cannot_be_changed() -> None:
    """A holder is a value."""
    with pytest.raises(AttributeError):
        HOLDER.host = "web-2"  # type: ignore[misc]
    HOLDER.as_json()["metadata"]["user"] = "Eve"
    assert HOLDER.metadata["user"] == "Ada"


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"reason": "nightly", "n": 1, "f": 0.5, "none": None, "yes": True},
        {"list": [1, ["a", {"b": []}]]},
        {"é🔒": "é🔒", "": ""},
    ],
)
def test_legal_metadata_survives_json(metadata: dict[str, Any]) -> None:
    """What is let in reads back equal."""
    made = validate_metadata(metadata)
    assert made == metadata
    assert json.loads(json.dumps(made)) == metadata


def test_metadata_is_copied_all_the_way_down() -> None:
    """Changing the caller's dictionary changes no lock; what the copy has, the store gives back."""

    class Text(str):
        """Text of a kind of its own."""

        __slots__ = ()

    metadata: dict[str, Any] = {"a": {"b": [1]}, Text("c"): (1, [Text("d")])}
    made = validate_metadata(metadata)
    metadata["a"]["b"].append(2)
    assert made == {"a": {"b": [1]}, "c": [1, ["d"]]}
    assert [type(text) for text in (*made, made["c"][1][0])] == [str] * 3
    assert type(made["c"]) is list


@pytest.mark.parametrize(
    ("metadata", "rule"),
    [
        (None, "must be a mapping, not None"),
        ([("a", 1)], "must be a mapping"),
        ("text", "must be a mapping"),
        ({1: "a"}, "A name in metadata must be a str, not 1"),
        ({"a": {None: 1}}, "A name in metadata must be a str, not None"),
        ({"a": object}, "must be JSON"),
        ({"a": {1, 2}}, "must be JSON"),
        ({"a": b"bytes"}, "must be JSON"),
        ({"a": math.nan}, "must be JSON: text, finite numbers, .*; not nan"),
        ({"a": [math.inf]}, "must be JSON"),
        ({"a": -math.inf}, "must be JSON"),
        ({"a": "x\0y"}, "NUL or surrogates"),
        ({"a\0": "x"}, "NUL or surrogates"),
        ({"a": ["\ud800"]}, "NUL or surrogates"),
        ({"a": 10**5000}, "metadata"),
    ],
)
def test_metadata_that_a_store_could_not_keep_is_refused(metadata: object, rule: str) -> None:
    """What JSON or PostgreSQL's `jsonb` would change or refuse is refused first."""
    with pytest.raises(InvalidArgument, match=rule):
        validate_metadata(metadata)


def test_metadata_that_contains_itself_is_refused() -> None:
    """A circle is no JSON, and no `RecursionError` either."""
    circle: dict[str, Any] = {}
    circle["self"] = circle
    with pytest.raises(InvalidArgument):
        validate_metadata(circle)


@pytest.mark.parametrize("char", ["x", "é", "🔒"])
def test_limit_of_metadata_is_inclusive_and_counts_bytes(char: str) -> None:
    """4096 bytes of JSON in UTF-8 are legal, one more is not."""
    frame = len(json.dumps({"a": ""}))
    width = len(char.encode())
    room, rest = divmod(MAX_METADATA_BYTES - frame, width)
    fitting = char * room + "x" * rest
    assert validate_metadata({"a": fitting}) == {"a": fitting}
    with pytest.raises(InvalidArgument, match="at most 4096 bytes of JSON, not 4097"):
        validate_metadata({"a": fitting + "x"})
