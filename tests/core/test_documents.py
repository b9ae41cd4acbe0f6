"""What JSON carries of values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from django_distlock.core.documents import Document, plain
from django_distlock.core.records import Grant, Holder, Waiting
from django_distlock.core.secrets import Secret, Token

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
SOON = "2026-01-02T03:04:05.678901+00:00"


@dataclass(frozen=True, slots=True)
class Made(Document):
    """A document of a test."""

    first: Any
    second: Any = None


def test_document_has_each_field_in_its_order() -> None:
    """Times to the microsecond; values in values, with or without a word of their own."""
    waiting = Waiting(Holder(host="h", metadata={"a": [1]}), AT, AT, is_woken=True)
    document = json.loads(json.dumps(Made({"waits": (waiting,)}, second=AT).as_json()))
    assert list(document) == ["first", "second"]
    assert document["second"] == SOON
    (told,) = document["first"]["waits"]
    assert told.pop("holder")["metadata"] == {"a": [1]}
    assert told == {"since": SOON, "until": SOON, "is_woken": True}


SECRETS: dict[str, object] = {
    "a password": Secret("s3cret"),
    "a token": Token("s3cret"),
    "a grant": Grant("k", "s3cret", 1, 9, AT, AT),
}


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_secret_goes_into_no_document(secret: object) -> None:
    """Wherever it is; and the error does not tell it either."""
    for value in (secret, {"in": [secret]}, Made(1, second=(secret,))):
        with pytest.raises(TypeError, match="part of a document") as caught:
            plain(value)
        assert "s3cret" not in str(caught.value)
