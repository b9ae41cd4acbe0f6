"""What an application adds to the identity of a holder: JSON that every store can keep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import InvalidArgument, shown

MAX_METADATA_BYTES = 4096
MAX_METADATA_DEPTH = 20


def is_plain_text(value: object) -> bool:
    """Whether every store can keep `value`: text without NUL and lone surrogates."""
    if not isinstance(value, str) or "\0" in value:
        return False
    return value.isascii() or not any(0xD800 <= ord(char) <= 0xDFFF for char in value)


def validate_metadata(metadata: object) -> dict[str, Any]:
    """Return a copy of `metadata`, which must survive JSON unchanged.

    Raises:
        InvalidArgument: Not a mapping, not JSON, with text that PostgreSQL's `jsonb` refuses (NUL,
            lone surrogates), or more than 4096 bytes.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(f"metadata must be a mapping, not {shown(metadata)}.")
    copy: dict[str, Any] = _json(metadata, MAX_METADATA_DEPTH)
    size = len(json.dumps(copy, ensure_ascii=False).encode())
    if size > MAX_METADATA_BYTES:
        raise InvalidArgument(
            f"metadata can have at most {MAX_METADATA_BYTES} bytes of JSON, not {size}."
        )
    return copy


def _json(value: object, depth: int) -> Any:
    if depth == 0:
        raise InvalidArgument(f"metadata is nested more than {MAX_METADATA_DEPTH} deep.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if isinstance(value, str):
        return _json_text(value)
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    if isinstance(value, (list, tuple)):
        return [_json(each, depth - 1) for each in value]
    if isinstance(value, Mapping):
        return {_json_text(name): _json(each, depth - 1) for name, each in value.items()}
    raise InvalidArgument(
        f"metadata must be JSON: text, finite numbers, lists and mappings; not {shown(value)}."
    )


def _json_text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"A name in metadata must be a str, not {shown(value)}.")
    if not is_plain_text(value):
        raise InvalidArgument(
            f"Text in metadata must not contain NUL or surrogates: {shown(value)}."
        )
    return str.__str__(value)
