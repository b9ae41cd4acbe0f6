"""Any text, number or object as an argument: it is taken, or refused by the rule that it breaks."""

from __future__ import annotations

import unicodedata
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from django_distlock.core.durations import seconds, ttl_seconds, wait_seconds
from django_distlock.core.errors import InvalidArgument
from django_distlock.core.keys import (
    MAX_KEY_BYTES,
    advisory_id,
    normalize_key,
    normalize_prefix,
    storage_key,
    stored_key,
    validate_token,
    whole_name,
)
from django_distlock.core.retry import Retry
from tests.drawn import drawn

#: With lone surrogates, NUL, and characters that NFC changes.
TEXTS = some.text() | some.text("a:%{}é\u0301\u212b\0\ud800😀", max_size=600)
OBJECTS = some.none() | some.booleans() | some.integers() | some.floats() | some.binary() | TEXTS
DURATIONS = OBJECTS | some.timedeltas() | some.decimals() | some.lists(some.none(), max_size=1)


@drawn(400)
@given(key=OBJECTS)
def test_any_key_is_taken_or_refused(key: Any) -> None:
    """What is taken is in NFC, within the bytes, and the same when it is asked for again."""
    with suppress(InvalidArgument):
        taken = normalize_key(key)
        assert 0 < len(taken.encode()) <= MAX_KEY_BYTES
        assert taken == unicodedata.normalize("NFC", taken) == normalize_key(taken)
        assert "\0" not in taken


@drawn(400)
@given(
    one=TEXTS, other=TEXTS, prefix=TEXTS, another=TEXTS, limit=some.sampled_from([80, 250, 1000])
)
def test_no_two_keys_are_one_in_a_store(
    one: str, other: str, prefix: str, another: str, limit: int
) -> None:
    """Other keys, or other prefixes, have other names, within the bytes of the store."""
    with suppress(InvalidArgument):
        pairs = {
            (normalize_prefix(which, limit), stored_key(key))
            for which in (prefix, another)
            for key in (one, other)
        }
        names = {storage_key(*pair, limit) for pair in pairs}
        assert len(names) == len(pairs)
        assert all(len(name.encode()) <= limit for name in names)
        assert {whole_name(name) for name in names} == names
        assert len({advisory_id("locks", name) for name in names}) == len(names)


@drawn(300)
@given(token=OBJECTS | some.text("abcXYZ019-_\n", min_size=20, max_size=24))
def test_any_token_is_taken_or_refused(token: Any) -> None:
    """No refusal repeats it: it may be a secret with a character too many."""
    try:
        assert len(validate_token(token)) == 22
    except InvalidArgument as refusal:
        told = str(refusal)
    else:
        told = ""
    # A few characters are in the words of the rule as well.
    assert not (isinstance(token, str) and len(token) >= 20 and token in told)


@drawn(300)
@given(value=DURATIONS)
def test_any_duration_is_taken_or_refused(value: Any) -> None:
    """What is taken is a finite number of seconds, not below the least."""
    for take, least in ((ttl_seconds, 0.1), (wait_seconds, 0.0)):
        with suppress(InvalidArgument):
            taken = take(value)
            assert taken is None or least <= taken <= 1e15
    with suppress(InvalidArgument):
        assert 1 <= seconds(value, "value", minimum=1, maximum=5) <= 5


@drawn(200)
@given(numbers=some.tuples(*[OBJECTS] * 3), retries=OBJECTS)
def test_any_retry_is_taken_or_refused(numbers: tuple[Any, Any, Any], retries: Any) -> None:
    """What is taken never pauses for longer than its cap."""
    with suppress(InvalidArgument):
        retry = Retry(*numbers, max_retries=retries)
        pauses = [pause for pause, _ in zip(retry.pauses(), range(50), strict=False)]
        assert all(0 < pause <= retry.cap for pause in pauses)
