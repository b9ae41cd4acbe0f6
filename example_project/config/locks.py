"""Which backend keeps the locks of the example."""

from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured

BACKENDS = "django_distlock.backends"


def backend(choice: str, using: str) -> dict[str, Any]:
    """Return the part of `DISTLOCK` that `SHOP_LOCKS` chooses.

    Args:
        choice: `database`, `session`, or the address of a Redis server; "" means `database`.
        using: The database for the first two.

    Raises:
        ImproperlyConfigured: It is none of them.
    """
    if choice in ("", "database"):
        return {"BACKEND": f"{BACKENDS}.database.DatabaseBackend", "OPTIONS": {"using": using}}
    if choice == "session":
        return {"BACKEND": f"{BACKENDS}.advisory.AdvisoryBackend", "OPTIONS": {"using": using}}
    if urlsplit(choice).scheme in ("redis", "rediss", "unix"):
        return {"BACKEND": f"{BACKENDS}.redis.RedisBackend", "OPTIONS": {"url": choice}}
    raise ImproperlyConfigured(
        f"SHOP_LOCKS must be database, session, or an address such as redis://127.0.0.1:6379/1,"
        f" not {choice!r}."
    )
