"""Keys: what is legal, what a store calls them, what advisory locks call them, and tokens."""

from __future__ import annotations

import enum
import itertools
import random
import re
import unicodedata
from typing import Any

import pytest

from django_distlock.core.errors import InvalidArgument
from django_distlock.core.keys import (
    HASH_MARKER,
    MAX_KEY_BYTES,
    IllegalKey,
    KeyTemplate,
    advisory_id,
    hashed_key,
    new_token,
    normalize_key,
    normalize_prefix,
    prefix_end,
    storage_key,
    stored_key,
    validate_token,
)


class Priority(enum.IntEnum):
    """An int that shows itself by a name."""

    HIGH = 3

    def __str__(self) -> str:
        return self.name


class Text(str):
    """A subclass of `str` that shows itself differently, as `SafeString` may."""

    __slots__ = ()

    def __str__(self) -> str:
        return "shown"

    def __repr__(self) -> str:
        return "Text()"


class Queue(str, enum.Enum):  # noqa: UP042 - `StrEnum` formats as its value, this does not
    """An enumeration whose members are text."""

    MAIL = "mail"


def test_legal_key_is_kept_as_it_is() -> None:
    """Colons, slashes, spaces, braces and emoji are legal; nothing is trimmed or folded."""
    keys = ["a", " ", " leading and trailing ", "invoice:42", "a/b:c{d}[e]%f", "id:1", "fence:1"]
    keys += ["Groß- und Kleinschreibung", "🔒", "👩‍👩‍👧", "\n\t", "\u200b"]
    assert [normalize_key(each) for each in keys] == keys


def test_spellings_equal_under_nfc_are_one_key() -> None:
    """There is no case folding, no trimming, no compatibility mapping."""
    one = {"caf\u00e9": "cafe\u0301", "\u212b": "\u00c5", "\u2126": "\u03a9"}
    one |= {"\uac00": "\u1100\u1161", "q\u0307\u0323": "q\u0323\u0307"}
    two = [("a", "A"), ("a", "a "), ("e", "\u00e9"), ("\ufb01", "fi"), ("1", "\u0661")]
    pairs = [*one.items(), *two]
    same = [pair for pair in pairs if normalize_key(pair[0]) == normalize_key(pair[1])]
    assert same == [*one.items()]


def test_exactly_512_bytes_are_legal() -> None:
    """The limit is inclusive, and counts bytes of UTF-8 after normalisation."""
    keys = ["x" * 512, "é" * 256, "🔒" * 128, unicodedata.normalize("NFD", "\u01d5" * 256)]
    assert {len(normalize_key(each).encode()) for each in keys} == {MAX_KEY_BYTES} == {512}


def test_long_text_is_refused_before_it_is_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client cannot stall a worker with combining characters, whose order costs their square."""
    monkeypatch.setattr("django_distlock.core.keys.unicodedata", None)
    text = "a" + "\u0300\u0323" * 60_000
    with pytest.raises(IllegalKey, match=r"at most 512 bytes of UTF-8; this text has 120001"):
        normalize_key(text)
    template = KeyTemplate.for_keywords("invoice:{number}")
    with pytest.raises(IllegalKey, match="this text has 120001"):
        template.of(number=text)


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("", "must not be empty"),
        ("a\0b", "must not contain NUL"),
        ("\ud800", "must not contain a lone surrogate"),
        ("a\udfff", "must not contain a lone surrogate"),
        *(
            (key, r"at most 512 bytes of UTF-8; this one has \d{3}")
            for key in ("x" * 513, "é" * 256 + "x", "🔒" * 128 + "x", "\ufb2c" * 86)
        ),
    ],
)
def test_illegal_text_is_refused_with_the_rule(key: str, rule: str) -> None:
    """Empty text, NUL, lone surrogates, and what is too long, with its size, are refused."""
    with pytest.raises(InvalidArgument, match=rule):
        normalize_key(key)


def test_int_and_subclass_of_str_become_a_str() -> None:
    """A primary key is the same key as its text; records have a `str` with the same characters."""
    digits = {42: "42", 0: "0", -7: "-7", Priority.HIGH: "3", 10**511 - 1: "9" * 511}
    texts: dict[Any, str] = {Text("plain"): "plain", Text("é"): "é", Queue.MAIL: "mail"}
    for key, text in {**digits, **texts}.items():
        assert normalize_key(key) == text
        assert type(normalize_key(key)) is str
    assert [stored_key(each) for each in digits] == [*digits.values()]


@pytest.mark.parametrize("key", [10**511, -(10**511), 10**5000], ids=["512", "513", "5001"])
def test_int_that_is_too_long_is_refused(key: int) -> None:
    """Also one that Python would not write down."""
    with pytest.raises(IllegalKey, match="at most 512 bytes"):
        normalize_key(key)


TEXTS = ["", "x", "x" * 10_000, "\0", "\ud800", "é", "e\u0301", "page:x"]


def test_hashed_keys_of_any_texts_are_legal_and_differ() -> None:
    """A text that no key could be has one, which says what it is about."""
    keys = {text: hashed_key("page", text) for text in TEXTS}
    assert len({*keys.values()}) == len(TEXTS)
    for text, key in keys.items():
        assert normalize_key(key) == key == hashed_key("page", text)
        assert re.fullmatch(r"page:[\w-]{43}", key, re.ASCII)
    assert hashed_key("other", "x") != hashed_key("page", "x")
    # SHA-256 of the empty text, as anybody computes it.
    assert keys[""] == "page:47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("", "x", "empty"),
        ("n" * 469, "x", "at most 512 bytes"),
        ("page", None, "takes a name and a text, not None"),
        ("page", b"x", "takes a name and a text, not b'x'"),
        (5, "x", "takes a name and a text, not 5"),
    ],
)
def test_hashed_key_refuses_what_breaks_a_rule(name: Any, text: Any, rule: str) -> None:
    """With the value, or the rule."""
    with pytest.raises(InvalidArgument, match=rule):
        hashed_key(name, text)
    assert len(hashed_key("n" * 468, "x")) == MAX_KEY_BYTES


@pytest.mark.parametrize("key", [None, b"bytes", 4.2, ["a"], True, object])
def test_other_types_are_refused_with_the_value(key: object) -> None:
    """A key is text or an int: nothing else is converted; the message names type and value."""
    with pytest.raises(InvalidArgument, match="must be a str") as caught:
        normalize_key(key)
    assert type(key).__name__ in str(caught.value)
    assert repr(key) in str(caught.value)


def test_storage_key_vectors() -> None:
    """Every version makes the same name of a key: two of them may run side by side."""
    for *given, expected in (
        ("distlock", "invoice:42", 100, "distlock:invoice:42"),
        ("", "invoice:42", 100, ":invoice:42"),
        ("my:app", "invoice:42", 100, "my%3Aapp:invoice:42"),
        ("100%", "invoice:42", 100, "100%25:invoice:42"),
        ("distlock", "x" * 60, 50, "distlock\u2126REMHUM_bgaSN6ksyc3Z6IQ"),
        ("distlock", "é" * 30, 50, "distlock\u2126OoRVW8wpfgbgcJDyUwOFVw"),
        ("", "x" * 60, 50, "\u2126GX9Hig0I3i9hOigGYZOTxQ"),
    ):
        assert storage_key(*given) == expected


def test_limit_of_a_storage_key_is_inclusive() -> None:
    """A name of exactly the limit is readable; one byte more is hashed."""
    for key in ("k" * 10, "é" * 5, "🔒🔒kk"):
        readable = f"p:{key}"
        assert len(readable.encode()) == 12
        assert storage_key("p", key, 12) == readable
        assert storage_key("p", key, 11).startswith(f"p{HASH_MARKER}")


def test_hashed_storage_key_fits_where_the_prefix_does() -> None:
    """A prefix that is let in leaves room for the marker and 22 characters."""
    limit = 40
    prefix = normalize_prefix("p" * 15, limit)
    assert len(storage_key(prefix, "k" * 100, limit).encode()) == limit
    with pytest.raises(InvalidArgument, match=r"too long: .* 41 bytes, and this store takes 40"):
        normalize_prefix("p" * 16, limit)


@pytest.mark.parametrize("limit", [100, 4], ids=["readable", "hashed"])
def test_no_two_pairs_make_one_name(limit: int) -> None:
    """Whatever stands on which side of the joint, prefix and key are told from each other."""
    texts = ["".join(each) for size in range(4) for each in itertools.product("a:%3A", repeat=size)]
    prefixes = {normalize_prefix(each, 100) for each in texts}
    names = [storage_key(prefix, key, limit) for prefix in prefixes for key in texts if key]
    assert len(set(names)) == len(names)


def test_no_key_contains_the_marker() -> None:
    """A key that imitates a hashed name is another name, and the prefix is hashed in."""
    hashed, other = (storage_key(prefix, "k" * 100, 60) for prefix in ("one", "other"))
    assert hashed.partition(HASH_MARKER)[2] != other.partition(HASH_MARKER)[2]
    assert storage_key("", normalize_key(hashed), 60) != hashed
    # NFC rewrites the marker.
    assert HASH_MARKER not in normalize_key(f"a{HASH_MARKER}b")
    assert HASH_MARKER not in normalize_prefix(f"a{HASH_MARKER}b", 60)


def test_trailing_colons_of_a_prefix_are_dropped() -> None:
    """`"app"` and `"app:"` are one namespace; prefixes are NFC like keys."""
    made = {"app:": "app", "app:::": "app", "a:b:": "a:b", ":": "", "": "", "e\u0301": "é"}
    assert {each: normalize_prefix(each, 100) for each in made} == made


@pytest.mark.parametrize(
    ("prefix", "rule"),
    [
        ("a{b", "braces"),
        ("a}b", "braces"),
        ("a\0b", "NUL"),
        ("a\ud800", "surrogate"),
        ("p" * 100, "too long"),
        (None, "must be a str, not None"),
        (b"p", "must be a str, not b'p'"),
    ],
)
def test_bad_prefix_is_refused_with_the_rule(prefix: object, rule: str) -> None:
    """A prefix that would break a store's keys is refused before there are any."""
    with pytest.raises(InvalidArgument, match=rule):
        normalize_prefix(prefix, 60)


def test_hundred_thousand_keys_make_as_many_names() -> None:
    """Neither hashed storage keys nor advisory numbers collide."""
    keys = [f"invoice:{number}:{'x' * 40}" for number in range(100_000)]
    names = {storage_key("p", key, 40) for key in keys}
    assert len(names) == len(keys)
    assert all(HASH_MARKER in name for name in names)
    assert len({advisory_id("salt", name) for name in names}) == len(keys)


def test_advisory_vectors() -> None:
    """Every version makes the same number of a name, and each salt another one."""
    made = {
        ("a", "k"): -7337921046377067402,
        ("b", "k"): 2764628968360607873,
        ("a", "k2"): 8654691549450801814,
        ("django_distlock", "distlock:invoice:42"): -439316130616502465,
    }
    assert {each: advisory_id(*each) for each in made} == made


def test_advisory_numbers_use_all_signed_64_bits() -> None:
    """The numbers fill PostgreSQL's `bigint`; and salt and name are kept apart."""
    numbers = [advisory_id("salt", str(number)) for number in range(2000)]
    assert all(-(2**63) <= number < 2**63 for number in numbers)
    for bit in range(64):
        ones = sum(number >> bit & 1 for number in numbers)
        assert 800 < ones < 1200, bit
    assert advisory_id("ab", "c") != advisory_id("a", "bc")


def test_prefix_end_bounds_exactly_the_texts_with_the_prefix() -> None:
    """Between a prefix and its end lie the texts that start with it, and no others."""
    alphabet = "az:~\x7f\u00e9\ud7ff\ue000\U0001f512\U0010ffff"
    chance = random.Random(7)
    texts = ["".join(chance.choices(alphabet, k=chance.randint(0, 4))) for _ in range(3000)]
    for prefix in [*alphabet, "\U0010ffff" * 2, "a\U0010ffff", *texts[:60]]:
        end = prefix_end(prefix)
        for text in texts:
            inside = text >= prefix and (end is None or text < end)
            assert inside == text.startswith(prefix), (prefix, text)
    # Over the gap of the surrogates.
    assert prefix_end("\ud7ff") == "\ue000"


def test_tokens_are_22_random_base64url_characters() -> None:
    """A token is 128 random bits in base64url, and no two are equal."""
    tokens = [new_token() for _ in range(5000)]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{22}", token) for token in tokens)
    assert len(set(tokens)) == len(tokens)
    # The last character carries two bits: 22 of them carry 132 bits, and 128 are random.
    assert {token[-1] for token in tokens} == set("AQgw")
    assert {char for token in tokens for char in token[:-1]} == set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
    )
    assert all(validate_token(token) == token for token in tokens)


def test_malformed_token_is_refused_without_repeating_it() -> None:
    """A token is checked with a full match; the message does not show what may be a secret."""
    texts = ["", "a" * 21, "a" * 23, "a" * 21 + "+", "a" * 21 + "\n", "a" * 22 + "\n", "é" * 22]
    tokens: list[Any] = [*texts, "\u0661" * 22, None, 22, b"a" * 22]
    for token in tokens:
        with pytest.raises(InvalidArgument, match="A token must be 22 characters") as caught:
            validate_token(token)
        assert caught.value.code == "invalid_argument"
        assert not token or str(token) not in str(caught.value).replace("22 characters", "")
