"""Two keys are one lock if they are the same text in NFC, byte by byte, and never otherwise."""

from __future__ import annotations

import unicodedata

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import normalize_key, own_key
from tests.backends import Registered

from .helpers import contend, finds, held, listed, take
from .stores import Store

TEXTS = (
    ":a:b::", "/a/b", " a b ", "{a}", "{", "}", "a}b{c", "%s%%", "🔒", "Füße", "日本語", "ключ",
    "\t\n\r", "'\"\\;--", "\x01\x7f", "-_.~", "\u2028", "\u2126", "\ufeff", "\U0010ffff",
)  # fmt: skip


def test_any_text_is_a_key(backend: BaseLockBackend, key: str) -> None:
    """Punctuation, spaces, braces and every script make keys that can be held, read and listed."""
    for number, end in enumerate(TEXTS):
        given = f"{key}{number}{end}"
        grant = take(backend, given)
        assert grant.key == unicodedata.normalize("NFC", given)
        contend(backend, given)
        assert held(backend, given).key == grant.key
        assert listed(backend, given) == [grant.key]
        assert backend.release(grant) is True


def test_longest_key_has_512_bytes(
    backend: BaseLockBackend, registered: Registered, key: str
) -> None:
    """A key of exactly 512 bytes works in every operation."""
    room = 512 - len(key)
    for char in "ké語🔒":
        longest = key + char * (room // len(char.encode()))
        longest += "x" * (512 - len(longest.encode()))
        assert len(longest.encode()) == 512
        grant = take(backend, longest)
        contend(backend, longest, wanted=True)
        assert backend.extend(grant)
        assert backend.extend_many([grant])[0]
        assert finds(backend, grant.token, held(backend, longest))
        assert listed(backend, longest) == [longest]
        assert backend.request_stop(longest)
        assert not backend.supports_ttl or backend.request_stop(longest, 5)
        assert backend.release(grant) is True
        assert registered.is_next(take(backend, longest).fence, grant.fence)
        assert backend.force_release(longest)


def test_keys_of_our_own_are_out_of_reach(backend: BaseLockBackend, key: str) -> None:
    """No text of a project is such a key, and everything finds one by what a record calls it."""
    own = own_key(f"unique:{key}")
    alike = [f"unique:{key}", normalize_key(str.__str__(own))]
    grant = take(backend, own)
    assert own not in alike
    for each in alike:
        assert backend.release(take(backend, each)) is True
    contend(backend, str.__str__(own))
    record = held(backend, str.__str__(own))
    assert (record.key, grant.key) == (own, own)
    assert not backend.supports_listing or listed(backend, str.__str__(own)) == [own]
    assert backend.extend(grant)
    assert backend.release(grant) is True


def test_spellings_of_one_text_are_one_lock(
    backend: BaseLockBackend, registered: Registered, key: str
) -> None:
    """In NFD and in NFC a key contends with itself, is found by either, and is plain text."""

    class Loud(str):
        __slots__ = ()

    nfc, nfd = f"{key}-caf\u00e9", Loud(f"{key}-cafe\u0301")
    grant = take(backend, nfd)
    assert grant.key == nfc
    contend(backend, nfc)
    contend(backend, nfd)
    assert backend.read(nfc) == backend.read(nfd)
    assert type(grant.key) is type(held(backend, nfd).key) is str
    assert backend.request_stop(nfc)
    assert backend.release(grant) is True
    assert registered.is_next(take(backend, Loud(nfc)).fence, grant.fence)
    assert type(held(backend, Loud(nfc)).key) is str
    assert backend.force_release(nfd)


def test_key_is_measured_in_nfc(backend: BaseLockBackend, key: str) -> None:
    """A key that is too long in NFD and not in NFC is legal; the last byte makes another lock."""
    nfd = key + "e\u0301" * ((512 - len(key)) // 2)
    assert len(nfd.encode()) > 512
    take(backend, nfd)
    start = key + "k" * (511 - len(key))
    take(backend, start + "a")
    take(backend, start + "b")


#: Texts of which some collation takes one for another of its group.
ALIKE = (
    ("a", "A", "a ", " a", "a  ", "a\t", "a\n", "a\u200b", "\u0430"), ("é", "e", "É"),
    ("ß", "ss", "SS"), ("i", "\u0131", "\u0130"), ("ﬁ", "fi"), ("1", "\uff11", "01"),
    ("a:b", "a/b", "a.b", "a_b", "a%b"), ("", ":", "::"),
)  # fmt: skip


def test_texts_that_look_alike_are_different_locks(
    backend: BaseLockBackend, registered: Registered, key: str
) -> None:
    """Case, accents, width and spaces around make another key."""
    groups = [[take(backend, f"{key}{end}") for end in ends] for ends in ALIKE]
    grants = [grant for group in groups for grant in group]
    assert all(registered.is_next(grant.fence) for grant in grants)
    assert len({grant.key for grant in grants}) == len(grants)
    for grant in grants:
        assert held(backend, grant.key).token == grant.token
    for first, *others in groups:
        assert backend.release(first) is True
        for grant in others:
            assert held(backend, grant.key).token == grant.token


@pytest.mark.requires("supports_token_lookup")
def test_token_counts_with_its_case(backend: BaseLockBackend, key: str) -> None:
    """Tokens that differ in case alone are two tokens."""
    lower, upper = f"{key}-lower", f"{key}-upper"
    text = (key * 2)[:22]
    first = take(backend, lower, token=text.lower())
    second = take(backend, upper, token=text.upper())
    assert held(backend, lower).token == first.token
    assert backend.read_token(second.token) == held(backend, upper)
    assert backend.read_token(first.token) == held(backend, lower)
    assert backend.release(first) is True
    assert backend.read_token(second.token) is not None


def test_no_key_reaches_another_record(backend: BaseLockBackend, store: Store, key: str) -> None:
    """Names that a store might use inside are plain keys: they change no other lock."""
    victim = take(backend, key)
    before = held(backend, key)
    starts = ("id:", "fence:", "lock:", "token:", "pause:", "distlock:", "distlock", ":", "\u2126")
    targets = (key, victim.token, store.name(key))
    for name in {start + target for start in starts for target in targets} - {key}:
        grant = take(backend, name)
        assert store.registered.is_next(grant.fence)
        assert backend.release(grant) is True
        take(backend, name)
        assert backend.force_release(name)
    assert held(backend, key) == before
    assert store.fence(key) == victim.fence
    assert finds(backend, victim.token, before)
    assert backend.release(victim) is True


def test_no_key_prefix_reaches_into_another(store: Store, key: str) -> None:
    """Prefix and key in other places are other locks: held, listed, counted and taken apart."""
    pairs = [
        (key, "user:42"),
        (f"{key}:user", "42"),
        (f"{key}::user", "42"),
        (f"{key}%3Auser", "42"),
        (f"{key}%253Auser", "42"),
        (key, ":user:42"),
        (f"{key}:lock", "user:42"),
        ("", f"{key}:user:42"),
        ("", f":{key}:user:42"),
        # Longer than what Redis and databases keep as it is.
        (key, f"user:{'4' * 500}"),
        (f"{key}:user", "4" * 500),
    ]
    stores = {prefix: store.with_prefix(prefix) for prefix in dict(pairs)}
    grants = [(stores[prefix], take(stores[prefix], name)) for prefix, name in pairs]
    assert all(store.registered.is_next(grant.fence) for _, grant in grants)
    for prefix, each in stores.items():
        own = sorted(name for other, name in pairs if other == prefix)
        assert [name for name in sorted(listed(each)) if prefix or key in name] == own
    backend, grant = grants.pop(0)
    assert backend.force_release(grant.key)
    for backend, grant in grants:
        contend(backend, grant.key)
        assert backend.release(grant) is True
