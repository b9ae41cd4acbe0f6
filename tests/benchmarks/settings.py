"""Django's settings for the benchmarks, over the servers that `databases.serve` started."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.settings import database

SERVER = urlsplit(os.environ.get("DISTLOCK_BENCH_URL", "postgresql://postgres@127.0.0.1/postgres"))
SCRATCH = Path(os.environ.get("DISTLOCK_BENCH_SCRATCH", tempfile.gettempdir()))
#: Databases that one benchmark has for itself: aliases of Django's and of lock backends.
EXTRA = os.environ.get("DISTLOCK_BENCH_DATABASES", "").split()


def postgres(name: str) -> dict[str, Any]:
    """Describe a database of the private server."""
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": f"bench_{name}",
        "USER": SERVER.username or "",
        "HOST": SERVER.hostname or "",
        "PORT": str(SERVER.port or ""),
        "CONN_MAX_AGE": None,
        "OPTIONS": {},
    }


DATABASES: dict[str, dict[str, Any]] = {
    "default": postgres("default"),
    # Migrated once; the others are copies of it.
    "template": postgres("template"),
    # Its port becomes the proxy's, which reads what goes by.
    "proxied": postgres("default"),
    "sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": SCRATCH / "bench.sqlite3",
        "OPTIONS": {"timeout": 5, "init_command": "PRAGMA journal_mode=WAL"},
    },
    **{name: postgres(name) for name in EXTRA},
}

MARIADB = os.environ.get("DISTLOCK_BENCH_MYSQL_URL")
if MARIADB:
    DATABASES["mariadb"] = {**database(MARIADB), "CONN_MAX_AGE": None}

#: Of a pooler in front of the same server, in transaction mode.
POOLER = os.environ.get("DISTLOCK_BENCH_POOLER")
if POOLER:
    DATABASES["pooled"] = {
        **postgres("default"), "HOST": "127.0.0.1", "PORT": POOLER,
        "DISABLE_SERVER_SIDE_CURSORS": True,
    }  # fmt: skip

#: The ports of proxies in front of the servers, which delay their answers.
WIRED = os.environ.get("DISTLOCK_BENCH_WIRED")
if WIRED:
    DATABASES["wired"] = {**postgres("default"), "HOST": "127.0.0.1", "PORT": WIRED}

REDIS = os.environ.get("DISTLOCK_BENCH_REDIS_URL", "redis://127.0.0.1:6379/0")
WIRED_REDIS = os.environ.get("DISTLOCK_BENCH_WIRED_REDIS", REDIS)
#: Of the peer that locks through a cache.
CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": WIRED_REDIS}}
#: A peer that warns of each attempt that loses; and that nobody can listen behind a pooler.
LOUD = ["redis_lock", *(["django_distlock"] if POOLER else [])]
LOGGING = {"version": 1, "loggers": {name: {"level": "ERROR"} for name in LOUD}}

INSTALLED_APPS = [
    "django_distlock",
    # A peer, where it is installed.
    *(name for name in ("pgactivity", "pglock") if find_spec("pglock")),
]
SECRET_KEY = "only for benchmarks"
USE_TZ = True

DATABASE_BACKEND = "django_distlock.backends.database.DatabaseBackend"


def locks(using: str, prefix: str = "distlock", **options: Any) -> dict[str, Any]:
    """Describe a lock backend on a database."""
    return {
        "BACKEND": DATABASE_BACKEND,
        "KEY_PREFIX": prefix,
        "OPTIONS": {"using": using, **options},
    }


DISTLOCK: dict[str, dict[str, Any]] = {
    "default": locks("default"),
    "functions": locks("default"),
    "orm": locks("default", "orm", server_functions=False),
    "proxied_functions": locks("proxied", "proxied"),
    "proxied_orm": locks("proxied", "proxied-orm", server_functions=False),
    "sqlite": locks("sqlite"),
    "memory": {"BACKEND": "django_distlock.backends.memory.MemoryBackend"},
    "redis": {
        "BACKEND": "django_distlock.backends.redis.RedisBackend",
        "OPTIONS": {"url": REDIS},
    },
    # Keys of their own: both are measured in the same rounds.
    "redis-async": {
        "BACKEND": "django_distlock.backends.redis.RedisBackend",
        "KEY_PREFIX": "distlock-async",
        "OPTIONS": {"url": REDIS},
    },
    **{
        name: {
            "BACKEND": "django_distlock.backends.advisory.AdvisoryBackend",
            "KEY_PREFIX": name,
            "OPTIONS": {"using": "default"},
        }
        for name in ("advisory", "advisory-fresh")
    },
    **({"mariadb": locks("mariadb")} if MARIADB else {}),
    **({"wired": locks("wired", "wired")} if WIRED else {}),
    "wired-redis": {
        "BACKEND": "django_distlock.backends.redis.RedisBackend",
        "OPTIONS": {"url": WIRED_REDIS},
    },
    **({"pooled": locks("pooled", "pooled")} if POOLER else {}),
    **{name: locks(name) for name in EXTRA},
}
