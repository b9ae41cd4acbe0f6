"""Tokens and passwords: texts that are masked where they are shown, and go into no pickle."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from django_distlock.core.errors import shown
from django_distlock.core.keys import new_token, validate_token
from django_distlock.core.records import Grant, Holder, Record
from django_distlock.core.secrets import Token, without_credentials
from django_distlock.exceptions import InvalidLockBackend

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLAIN = "A" * 22
GRANT = Grant("key", PLAIN, 1, 30.0, NOW, NOW)
RECORD = Record("key", PLAIN, 1, 30.0, NOW, NOW, NOW, NOW, Holder())


def test_token_is_the_text_that_it_is() -> None:
    """Compared, looked up, joined and sent as any text."""
    token = Token(PLAIN)
    assert token == PLAIN
    assert {PLAIN: 1}[token] == 1
    assert (f"{token}", str(token), json.dumps(token)) == (PLAIN, PLAIN, f'"{PLAIN}"')
    assert type(str(token)) is str


@pytest.mark.parametrize(
    "made",
    [new_token(), validate_token(PLAIN), GRANT.token, RECORD.token],
    ids=["new", "checked", "grant", "record"],
)
def test_every_token_is_masked(made: str) -> None:
    """Those that are made, checked, and come from a store as plain text."""
    assert repr([made]) == "[<token>]"
    assert repr({made: made}) == "{<token>: <token>}"


@pytest.mark.parametrize(
    "value",
    [Token(PLAIN), GRANT, RECORD, [RECORD], replace(GRANT, fence=2)],
    ids=["token", "grant", "record", "records", "changed"],
)
def test_nothing_with_a_token_is_pickled(value: Any) -> None:
    """A cache, a queue or a process pool would keep it where others read; the way is named."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=r"token cannot be pickled.* dump\(\)"):
            pickle.dumps(value, protocol)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, asdict])
def test_records_are_copied(copied: Callable[[Any], Any]) -> None:
    """Within the process, where it is already."""
    made = copied(RECORD)
    assert made == (asdict(RECORD) if copied is asdict else RECORD)
    assert PLAIN not in repr(made)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("redis://ada:pa@ss/w:rd@host:6379/1", "redis://…@host:6379/1"),
        ("'rediss://:hidden@host' and 'x'", "'rediss://…@host' and 'x'"),
        ("redis://host:6379/1", "redis://host:6379/1"),
        ("ada@example.org", "ada@example.org"),
    ],
)
def test_addresses_tell_no_password(text: str, told: str) -> None:
    """Whatever characters it has, and where it is cut short."""
    assert without_credentials(text) == told
    assert str(InvalidLockBackend(text)) == told
    assert "hidden" not in shown(f"redis://:{'hidden' * 20}@host")
