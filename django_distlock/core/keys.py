"""Keys: what is legal, what a store calls them, and how arguments become one."""

from __future__ import annotations

import binascii
import datetime
import decimal
import enum
import hashlib
import inspect
import os
import re
import string
import unicodedata
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from .bodies import signature_of
from .errors import InvalidArgument, shown
from .secrets import Token

MAX_KEY_BYTES = 512

#: Characters of a text whose NFC may still fit into a key: no character of NFC has more than three
#: characters in another spelling for each two of its bytes (U+01D5 has that many).
MAX_SPELT = MAX_KEY_BYTES * 3 // 2

#: Stands between prefix and hash where the readable form would be too long. The Ohm sign is not
#: in NFC (which writes a Greek omega), so no normalised key can contain it.
HASH_MARKER = "\u2126"

#: What the keys of this package's own begin with. No key that a project makes does: NFC writes
#: another angle bracket.
OWN_MARKER = "\u2329"
#: What the keys of tasks begin with of which one is queued or running.
UNIQUE_PREFIX = f"{OWN_MARKER}unique:"
#: What the keys of their runs begin with, where a further one may be queued meanwhile. Not longer.
RUNS_PREFIX = f"{OWN_MARKER}runs:"
#: What the keys begin with of which each call that waits behind a lock has a place. Not longer.
BACKLOG_PREFIX = f"{OWN_MARKER}queue:"
#: Stands in a storage key between that of the key and the place of one of those who share it. NFC
#: writes another bracket here, too.
PLACE_MARKER = "\u232a"
#: Bytes that the place adds to a storage key.
PLACE_BYTES = 25

_TOKEN = re.compile(r"[A-Za-z0-9_-]{22}")


class IllegalKey(InvalidArgument):
    """A text that no key can be: what a client sends may be one."""


#: What a project may give as a key.
Key: TypeAlias = str | int


class OwnKey(str):
    """A key of this package's own: see `own_key`."""

    __slots__ = ()


def own_key(name: str) -> OwnKey:
    """Return a key that no text of a project makes: that of a schedule, or of a queued task.

    Args:
        name: What stands after the marker: `"schedule:nightly-report"`.

    Raises:
        InvalidArgument: See `normalize_key`.
    """
    key = OWN_MARKER + normalize_key(name.removeprefix(OWN_MARKER))
    return OwnKey(_checked(key))


def stored_key(key: object) -> str:
    """Return a key as stores and people know it: one of our own, or one of the project.

    Raises:
        InvalidArgument: See `normalize_key`.
    """
    # What is equal to a plain text may be something else, and may have no hash.
    return _stored_text(key) if type(key) is str else _stored(key)


def _stored(key: object) -> str:
    if isinstance(key, str) and key.startswith(OWN_MARKER):
        return own_key(key)
    return normalize_key(key)


#: Each call about a lease names its key again.
_stored_text = lru_cache(maxsize=1024)(_stored)


def normalize_key(key: object) -> str:
    """Return `key` in NFC: two spellings that look the same are one lock. An int is its digits.

    Raises:
        InvalidArgument: Neither a `str` nor an `int`, or True or False.
        IllegalKey: Empty, longer than 512 bytes of UTF-8, or with NUL or a lone surrogate.
    """
    if type(key) is str and key.isascii() and 0 < len(key) <= MAX_KEY_BYTES and "\0" not in key:
        return key  # As nearly every key is. What follows takes five times as long.
    if isinstance(key, OwnKey):
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        # Python refuses to write down much longer ones.
        if abs(key) >= 10 ** (MAX_KEY_BYTES - 1):
            raise IllegalKey(
                f"A key has at most {MAX_KEY_BYTES} bytes, and this int has more digits."
            )
        return int.__repr__(key)
    if not isinstance(key, str):
        remedy = ' A decorator takes a key first: @distlock("…").' if callable(key) else ""
        raise InvalidArgument(
            f"A key must be a str or an int, not {type(key).__name__} ({shown(key)}).{remedy}"
        )
    if not key:
        raise IllegalKey("A key must not be empty.")
    return _checked(nfc(key))


def hashed_key(name: str, text: str) -> str:
    """Return a key for a text that may be empty, or longer than a key: an address, a query.

    It has 43 characters that stand for SHA-256 of the text, as it is: two spellings that look the
    same are two keys.

    Args:
        name: What stands before the hash, so that people and metrics know what it is about.
        text: Any text, NUL and lone surrogates included.

    Raises:
        InvalidArgument: An argument is no `str`, or the name breaks a rule of keys.
        IllegalKey: With the hash, the name is longer than 512 bytes of UTF-8.
    """
    if not (isinstance(name, str) and isinstance(text, str)):
        wrong = text if isinstance(name, str) else name
        raise InvalidArgument(f"hashed_key() takes a name and a text, not {shown(wrong)}.")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return normalize_key(f"{normalize_key(name)}:{_base64(digest)}")


def nfc(text: str) -> str:
    """Return a text that is a key, or becomes a part of one, in NFC.

    The length comes first: the time that NFC takes grows with the square of the length of a run of
    combining characters.

    Raises:
        IllegalKey: So long that no key could hold it.
    """
    if len(text) > MAX_SPELT:
        raise IllegalKey(
            f"A key has at most {MAX_KEY_BYTES} bytes of UTF-8; this text has {len(text)}"
            f" characters: {text[:40]!r}…"
        )
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def _checked(key: str) -> str:
    if "\0" in key:
        raise IllegalKey(f"A key must not contain NUL: {shown(key)}.")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise IllegalKey(f"A key must not contain a lone surrogate: {shown(key)}.") from None
    if size > MAX_KEY_BYTES:
        raise IllegalKey(
            f"A key has at most {MAX_KEY_BYTES} bytes of UTF-8; this one has {size}: {key[:40]!r}…"
        )
    # A subclass of str (SafeString, an enum's member) would travel into records and repr.
    return str.__str__(key)


def normalize_prefix(prefix: object, limit: int) -> str:
    """Return a namespace for keys in NFC, without its trailing colons.

    Args:
        limit: The bytes of the longest storage key.

    Raises:
        InvalidArgument: Not a `str`, with NUL, a lone surrogate or a brace, or so long that not
            even a hashed key fits after it.
    """
    if not isinstance(prefix, str):
        raise InvalidArgument(f"A key prefix must be a str, not {shown(prefix)}.")
    prefix = unicodedata.normalize("NFC", prefix).rstrip(":")
    if any(bad in prefix for bad in "\0{}"):
        raise InvalidArgument(f"A key prefix must not contain NUL or braces: {shown(prefix)}.")
    try:
        size = len(_hashed(prefix, "").encode())
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"A key prefix must not contain a surrogate: {shown(prefix)}."
        ) from None
    if size > limit:
        raise InvalidArgument(
            f"The key prefix {prefix[:40]!r}… is too long: with a hashed key it makes {size} bytes,"
            f" and this store takes {limit}."
        )
    return prefix


@lru_cache(maxsize=1024)
def storage_key(prefix: str, key: str, limit: int) -> str:
    """Return what a store calls `key`: readable where it fits, hashed where it does not.

    Args:
        prefix: A namespace from `normalize_prefix`.
        key: A key from `normalize_key`.
        limit: The bytes of the longest storage key, inclusive.
    """
    full = namespace(prefix) + key
    # No character of UTF-8 is longer than 4 bytes: most keys need no encoding to be measured.
    if len(full) * 4 <= limit or len(full.encode()) <= limit:
        return full
    # Over the whole prefixed key, so that equal keys of two namespaces hash apart.
    return _hashed(prefix, full)


@lru_cache(maxsize=128)
def namespace(prefix: str) -> str:
    """Return what the storage keys of a prefix begin with, and those of no other prefix.

    The first colon ends it. One inside of the prefix is percent-encoded: the key `user:42` of `app`
    is not the key `42` of `app:user`.
    """
    return prefix.replace("%", "%25").replace(":", "%3A") + ":"


def place_name(name: str, token: str) -> str:
    """Return what a store calls the lease of one of those who share a key: its token is hidden."""
    return f"{name}{PLACE_MARKER}{key_hash(token)}"


def is_place(name: str) -> bool:
    """Whether a store calls a lease so that shares its key."""
    return PLACE_MARKER in name


def whole_name(name: str) -> str:
    """Return what a store calls the key of a lease, whether that shares the key or not."""
    return name.partition(PLACE_MARKER)[0]


def _hashed(prefix: str, full: str) -> str:
    return f"{namespace(prefix)[:-1]}{HASH_MARKER}{key_hash(full)}"


def key_hash(storage_name: str) -> str:
    """Return a short name for a storage key: 16 bytes of SHA-256 as 22 base64url characters."""
    return _base64(hashlib.sha256(storage_name.encode()).digest()[:16])


def prefix_end(prefix: str) -> str | None:
    """Return the first text, by code points, after all that start with `prefix`.

    None if there is no such text.
    """
    trimmed = prefix.rstrip(chr(0x10FFFF))
    if not trimmed:
        return None
    after = ord(trimmed[-1]) + 1
    return trimmed[:-1] + chr(0xE000 if after == 0xD800 else after)


def advisory_id(salt: str, storage_key: str) -> int:
    """Return a signed 64-bit number for advisory locks: the start of SHA-256.

    Args:
        salt: Keeps apart the uses that share a database's one space of advisory locks.
        storage_key: What to lock.
    """
    digest = hashlib.sha256(f"{salt}\0{storage_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def new_token() -> Token:
    """Return a proof of ownership: 16 random bytes as 22 base64url characters."""
    return Token(_base64(os.urandom(16)))


def validate_token(token: object) -> Token:
    """Return `token` if it has the form of one. No message repeats it: it may be a secret."""
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise InvalidArgument("A token must be 22 characters of A-Z, a-z, 0-9, '-' and '_'.")
    return token if type(token) is Token else Token(token)


def _base64(raw: bytes) -> str:
    return binascii.b2a_base64(raw, newline=False).translate(_URL_SAFE, b"=").decode()


_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def roots(template: str) -> list[str]:
    """Return the parameters that the fields of a template begin with, each once."""
    fields = [name for _literal, name, _spec in _parse(template) if name is not None]
    found = [*dict.fromkeys(re.split(r"[.\[]", name, maxsplit=1)[0] for name in fields)]
    wrong = [root for root in found if not root.isidentifier()]
    if wrong:
        raise InvalidArgument(
            f"The key template {template!r} names {wrong[0]!r}, which is no parameter. Write"
            " literal braces twice: {{ }}."
        )
    return found


def begins_with_field(template: str) -> bool:
    """Whether all of what a template makes may be chosen by a value."""
    literal, name, _spec = _parse(template)[0]
    return not literal and name is not None


@dataclass(frozen=True, slots=True)
class KeyTemplate:
    """A key with fields, filled from the arguments of a call: `"invoice:{invoice_id}"`.

    `f(1)` and `f(a=1)` make the same key, defaults included. A field may follow attributes and
    items (`{invoice.pk}`) and take a format spec (`{day:%Y-%m}`). Literal braces are doubled.

    With more than one field, the characters that separate fields are percent-encoded inside the
    values: `("1:2", "3")` and `("1", "2:3")` make different keys of `"{a}:{b}"`.
    """

    template: str
    signature: inspect.Signature
    #: Literal text, the field after it (None at the end), and the field's format spec.
    parts: tuple[tuple[str, str | None, str], ...]

    @classmethod
    def for_function(cls, template: str, function: Callable[..., Any]) -> KeyTemplate:
        """Return the template of `function`'s calls.

        Raises:
            InvalidArgument: The template is malformed, names what is not a parameter, or has two
                fields with nothing between them; or Django's `method_decorator` hides the method.
        """
        if getattr(function, "__module__", None) == "django.utils.decorators":
            raise InvalidArgument(
                f"A method is decorated where it is defined, without method_decorator: {template!r}"
                " could not see its parameters."
            )
        made = cls(template, signature_of(function), _parse(template))
        for literal, name, _spec in made.parts[1:]:
            if not literal and name is not None:
                raise InvalidArgument(
                    f"The key template {template!r} needs a separator before {{{name}}}: without"
                    " one, different arguments make the same key."
                )
        parameters = made.signature.parameters
        for root in roots(template):
            if root not in parameters:
                rest = [name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD]
                raise InvalidArgument(
                    f"The key template {template!r} names {root!r}, which is not a parameter of"
                    f" {function.__qualname__}{made.signature}."
                    + "".join(f" Write {{{name}[{root}]}} for one of **{name}." for name in rest)
                )
        return made

    @classmethod
    def for_keywords(cls, template: str) -> KeyTemplate:
        """Return the template of calls with keywords alone: see `for_function`."""

        def call(**_: object) -> None:
            """Take what the template names."""

        kinds = inspect.Parameter
        parameters = [kinds(root, kinds.KEYWORD_ONLY) for root in roots(template)]
        rest = kinds("_", kinds.VAR_KEYWORD)
        call.__signature__ = inspect.Signature([*parameters, rest])  # type: ignore[attr-defined]
        return cls.for_function(template, call)

    def of(self, *args: Any, **kwargs: Any) -> str:
        """Return the key of a call: see `render`."""
        return self.render(args, kwargs)

    def render(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the key of one call.

        Raises:
            InvalidArgument: A value has no canonical text, or the key is not legal.
            TypeError: The arguments do not fit the function.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        # Between fields only: what stands before the first and after the last cannot be confused.
        between = (literal for literal, name, _ in self.parts[1:] if name is not None)
        separators = set("".join(between))
        made = []
        for literal, name, spec in self.parts:
            made.append(literal)
            if name is not None:
                value, _root = string.Formatter().get_field(name, (), bound.arguments)
                made.append(_escape(self._text(name, value, spec), separators, literal))
        return normalize_key("".join(made))

    def _text(self, name: str, value: object, spec: str) -> str:
        if isinstance(value, enum.Enum):
            value = value.value
        if value is None:
            raise InvalidArgument(
                f"{{{name}}} in the key template {self.template!r} is None. A key names what is"
                " locked: give it a value."
            )
        if not isinstance(value, _CANONICAL):
            raise InvalidArgument(
                f"{{{name}}} in the key template {self.template!r} is of type"
                f" {type(value).__name__}, which has no canonical text. Use an attribute, as in"
                f" {{{name}.pk}}."
            )
        try:
            text = format(value, spec) if spec else str(value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{{{name}:{spec}}} in the key template {self.template!r}: {error}."
            ) from None
        return nfc(text)


_CANONICAL = (
    str, int, float, decimal.Decimal, uuid.UUID, datetime.date, datetime.time,
)  # fmt: skip


def _parse(template: str) -> tuple[tuple[str, str | None, str], ...]:
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InvalidArgument(f"The key template {template!r}: {error}.") from None
    parts: list[tuple[str, str | None, str]] = []
    before = ""
    for literal, name, spec, conversion in parsed:
        if conversion:
            raise InvalidArgument(
                f"The key template {template!r} has the conversion !{conversion}. Use the value"
                " itself or one of its attributes."
            )
        before += literal
        # Formatter.parse() splits a literal at doubled braces: such a piece has no field of its
        # own and belongs to the literal after it.
        if name is not None:
            parts.append((before, name, spec or ""))
            before = ""
    return (*parts, (before, None, ""))


def _escape(text: str, separators: set[str], before: str) -> str:
    """Encode in a value what could be taken for a separator."""
    if not separators:
        return text
    # A mark that is no separator itself: it begins an escape, and nothing else.
    mark = next(char for char in map(chr, range(ord("%"), 0x3000)) if char not in separators)
    escaped: list[str] = []
    for index, char in enumerate(text):
        # A combining character would melt into the separator before it.
        melts = index == 0 and not unicodedata.is_normalized("NFC", before + char)
        if char == mark or char in separators or melts:
            escaped.extend(f"{mark}{byte:02X}" for byte in char.encode())
        else:
            escaped.append(char)
    return "".join(escaped)
