"""The header that carries a fence to another service."""

from __future__ import annotations

from itertools import product
from typing import Any
from urllib.parse import quote

import pytest
from django.core.signing import Signer

from django_distlock import InvalidArgument, LockUsageError, distlock
from django_distlock.core.records import FENCE_MAX
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.fencing.http import HEADER, BadFence, fence_header, read_fence_header
from django_distlock.fencing.rejecting import Fence
from tests.contract.locking import held_elsewhere

SHARED = "shared by services"


def header_of(key: str = "invoice:42", fence: int = 7) -> str:
    """Return the text of a header."""
    return fence_header(Fence(key, fence))[HEADER]


def signed_by_hand(text: str, key: str = "only for tests") -> str:
    """Sign as another implementation with the same secret would."""
    return Signer(key=key, sep=";", salt="django_distlock.fence").sign(text)


def test_any_key_comes_through() -> None:
    """What is sent is plain ASCII, with the key, the fence and a signature."""
    keys = "invoice:42", "a;b;c", "100 % é🔒/?#\n", "\x01", ";", "%3B", "🔒" * 128, "a, b: c"
    for key, fence in product(keys, (7, FENCE_MAX)):
        text = header_of(key, fence)
        assert text.isascii()
        assert text.isprintable()
        assert " " not in text
        assert text.split(";")[:2] == [quote(key, safe=""), str(fence)]
        assert read_fence_header(text) == Fence(key, fence)


def test_header_has_its_form_for_good() -> None:
    """Services of different releases talk to each other: its form is part of the interface."""
    signature = "v-Fhjcs234QdKssiyTqSiGUtagNXyZTWzdv3U7kFJR8"
    assert header_of() == f"invoice%3A42;7;{signature}" == signed_by_hand("invoice%3A42;7")


def test_lease_is_what_one_sends(key: str) -> None:
    """Its key and fence arrive, and nothing of its token."""
    with distlock(key, backend="memory") as lease:
        text = fence_header(lease)[HEADER]
        assert read_fence_header(text) == Fence(key, lease.fence)
        assert lease.token not in text


def test_lease_without_a_fence_is_refused(key: str) -> None:
    """A block that runs without its lock has nothing to send."""
    lock = distlock(key, backend="memory", wait=0, on_conflict="run")
    with held_elsewhere(lock), lock as lease:
        assert not lease.held
        with pytest.raises(LockUsageError, match="no fence"):
            fence_header(lease)


def changed(text: str, place: int) -> str:
    """Change one character into another one that may stand there."""
    other = "8" if text[place] != "8" else "9"
    return f"{text[:place]}{other}{text[place + 1 :]}"


def test_no_character_may_be_changed() -> None:
    """Key, fence and signature belong together: whatever is changed, it is refused."""
    text = header_of()
    for place, character in enumerate(text):
        if character != ";":
            with pytest.raises(BadFence, match="DISTLOCK_FENCE_SECRET"):
                read_fence_header(changed(text, place))


def test_signature_of_another_fence_is_refused() -> None:
    """A stale holder does not raise its fence by itself, nor name another key."""
    key, _fence, signature = header_of(fence=7).split(";")
    for forged in (
        f"{key};8;{signature}",
        f"other;7;{signature}",
        f"{key};7;AAAA",
        # What some view signs of a visitor's text.
        Signer(sep=";").sign("invoice%3A42;8"),
    ):
        with pytest.raises(BadFence) as caught:
            read_fence_header(forged)
        assert caught.value.code == "bad_fence"
        assert isinstance(caught.value, InvalidArgument)
    for audience in ("", 5, "a" * 101, "a\nb"):
        with pytest.raises(InvalidArgument, match="audience .* 1 to 100 printable characters"):
            fence_header(Fence("invoice:42", 7), audience=audience)  # type: ignore[arg-type]


MALFORMED = [
    "",
    "invoice",
    "invoice;7",
    ";7;abc",
    "invoice;;abc",
    "invoice;7;",
    "invoice;0;abc",
    "invoice;-7;abc",
    "invoice;07;abc",
    "invoice;7.0;abc",
    "invoice;\N{ARABIC-INDIC DIGIT SEVEN};abc",
    f"invoice;{'9' * 16};abc",
    "in voice;7;abc",
    "invoice;7;abc;d",
    "invoice;7;abc\n",
    "invoice;7;abc, invoice;8;abc",
    "é;7;abc",
]


def test_malformed_header_is_refused() -> None:
    """Before its signature is looked at: it is a mistake, and no forgery."""
    # What no lock is called, or granted, is no fence, whoever signed it.
    never = "%FF;7", "%00;7", f"{'k' * 513};7", f"invoice;{FENCE_MAX + 1}", "%ED%A0%80;7"
    for text in (*MALFORMED, *map(signed_by_hand, never)):
        with pytest.raises(InvalidArgument) as caught:
            read_fence_header(text)
        assert not isinstance(caught.value, BadFence)
        assert text not in MALFORMED or "key;fence;signature" in str(caught.value)


# The secret


def test_services_share_a_secret(settings: Any) -> None:
    """With the same `DISTLOCK_FENCE_SECRET`, and by no accident, their own keys do not matter."""
    own = header_of()
    settings.DISTLOCK_FENCE_SECRET = SHARED
    with pytest.raises(BadFence):
        read_fence_header(own)
    text = header_of()
    settings.SECRET_KEY = "another"
    assert read_fence_header(text) == Fence("invoice:42", 7)
    settings.DISTLOCK_FENCE_SECRET = f"not {SHARED}"
    with pytest.raises(BadFence):
        read_fence_header(text)
    del settings.DISTLOCK_FENCE_SECRET
    with pytest.raises(BadFence):
        read_fence_header(own)


def test_secret_key_may_be_changed(settings: Any) -> None:
    """What was signed with a key that is a fallback now is believed."""
    text = header_of()
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "new", ["older", "only for tests"]
    assert read_fence_header(text) == Fence("invoice:42", 7)
    assert header_of() == signed_by_hand("invoice%3A42;7", "new") != text


def test_shared_secret_may_be_changed(settings: Any) -> None:
    """Every service believes both while they change it one by one; the first one signs."""
    settings.DISTLOCK_FENCE_SECRET = SHARED
    text = header_of()
    settings.DISTLOCK_FENCE_SECRET = [f"newer, {SHARED}", SHARED]
    assert read_fence_header(text) == Fence("invoice:42", 7)
    assert header_of() == signed_by_hand("invoice%3A42;7", f"newer, {SHARED}")
    settings.DISTLOCK_FENCE_SECRET = [f"newer, {SHARED}"]
    with pytest.raises(BadFence):
        read_fence_header(text)


def test_header_for_another_service_is_refused(settings: Any) -> None:
    """What was sent to one is not good for another one that has the same secret."""
    texts = {
        audience: fence_header(Fence("invoice:42", 7), audience=audience)[HEADER]
        for audience in (None, "ledger", "mail")
    }
    for ours in (["ledger"], ["mail", "ledger"], [None], ["ledger", None]):
        settings.DISTLOCK_FENCE_AUDIENCE = ours
        for audience, text in texts.items():
            if audience in ours:
                assert read_fence_header(text) == Fence("invoice:42", 7)
            else:
                with pytest.raises(BadFence, match="DISTLOCK_FENCE_AUDIENCE"):
                    read_fence_header(text)


def test_bad_secret_is_named_and_not_shown(settings: Any) -> None:
    """Neither sending nor reading goes on with a secret that is none."""
    text = header_of()
    for bad in ("", "hidden", 5, b"bytes", ["hidden"], []):
        settings.DISTLOCK_FENCE_SECRET = bad
        with pytest.raises(InvalidLockBackend, match="DISTLOCK_FENCE_SECRET") as caught:
            header_of()
        assert "hidden" not in str(caught.value)
        with pytest.raises(InvalidLockBackend, match="DISTLOCK_FENCE_SECRET"):
            read_fence_header(text)
