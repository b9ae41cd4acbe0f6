"""What stands for a key or a token where it must not be shown."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

from django.conf import settings
from django.utils.encoding import force_bytes


def hashed(value: str) -> str:
    """Return 24 lower-case hex digits: HMAC-SHA256 with the project's secret.

    The same as `salted_hmac("django_distlock", value, algorithm="sha256")` gives, which derives
    its key each time: that takes most of the time of a long listing.
    """
    key = _key(force_bytes(settings.SECRET_KEY))
    return hmac.digest(key, value.encode(), "sha256").hex()[:24]


def token_hash(token: str) -> str:
    """Return the hash of a token; "": the store that it comes from tells none."""
    return hashed(token) if token else ""


@lru_cache(maxsize=4)
def _key(secret: bytes) -> bytes:
    return hashlib.sha256(b"django_distlock" + secret).digest()
