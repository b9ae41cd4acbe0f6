"""Django's settings for the tests, over the servers that `tests.services_plugin` started."""

from __future__ import annotations

import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from psycopg import IsolationLevel

ENGINES = {
    "postgresql": "django.db.backends.postgresql",
    "mysql": "django.db.backends.mysql"
    if find_spec("MySQLdb")
    else "tests.contract.pymysql_engine",
}


def database(url: str) -> dict[str, Any]:
    """Turn the address of a database into Django's settings."""
    parts = urlsplit(url)
    return {
        "ENGINE": ENGINES[parts.scheme],
        "NAME": unquote(parts.path[1:]),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),
        "PORT": str(parts.port or ""),
        "OPTIONS": dict(parse_qsl(parts.query)),
    }


# Type checkers read the settings where no server runs: there the defaults do.
POSTGRES = database(os.environ.get("DISTLOCK_TEST_POSTGRES_URL", "postgresql:///postgres"))
# Not from `tests.contract.redis_clients`: to import a driver takes every worker most of a second.
REDIS_URL = os.environ.get("DISTLOCK_TEST_REDIS_URL", "redis://127.0.0.1:6379/0")
SCRATCH = Path(os.environ.get("DISTLOCK_TEST_SCRATCH", tempfile.gettempdir()))

DATABASES: dict[str, dict[str, Any]] = {
    "default": POSTGRES,
    "serializable": {
        **POSTGRES,
        "OPTIONS": {**POSTGRES["OPTIONS"], "isolation_level": IsolationLevel.SERIALIZABLE},
        "TEST": {"MIRROR": "default"},
    },
    "sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": SCRATCH / "distlock.sqlite3",
        "OPTIONS": {"timeout": 5, "init_command": "PRAGMA journal_mode=WAL"},
        # Named, or Django keeps it in memory, where no other process sees it.
        "TEST": {"NAME": str(SCRATCH / "test-distlock.sqlite3")},
    },
}
# The tests that need it are skipped where there is none, and the summary says so.
if "DISTLOCK_TEST_MYSQL_URL" in os.environ:
    DATABASES["mariadb"] = database(os.environ["DISTLOCK_TEST_MYSQL_URL"])
# A process that a test started works on the databases of that test.
for alias, name in json.loads(os.environ.get("DISTLOCK_TEST_DATABASES", "{}")).items():
    DATABASES[alias]["NAME"] = name

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django_distlock",
    "tests.shop",
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = "only for tests"
# The shop has rows that refuse stale fences, and no fence here outlives a failover. Tasks of tests
# have keys that nobody else chooses, and run without them on purpose.
SILENCED_SYSTEM_CHECKS = ["distlock.W002", "distlock.W007", "distlock.W008", "distlock.W403"]
USE_TZ = True

CACHES = {
    "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    # Of all processes.
    "shared": {
        "BACKEND": "django.core.cache.backends.filebased.FileBasedCache",
        "LOCATION": SCRATCH / "cache",
    },
    "nothing": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
    # Not where locks are: `clear()` would remove them.
    "redis": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": urlsplit(REDIS_URL)._replace(path="/1").geturl(),
    },
    # The same, which keeps no objects.
    "json": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": urlsplit(REDIS_URL)._replace(path="/1").geturl(),
        "OPTIONS": {"SERIALIZER": "django_redis.serializers.json.JSONSerializer"},
    },
}

DATABASE_BACKEND = "django_distlock.backends.database.DatabaseBackend"
REDIS_BACKEND = "django_distlock.backends.redis.RedisBackend"
DISTLOCK: dict[str, dict[str, Any]] = {
    "default": {"BACKEND": DATABASE_BACKEND, "OPTIONS": {"using": "default"}},
    "memory": {"BACKEND": "django_distlock.backends.memory.MemoryBackend"},
    "sqlite": {"BACKEND": DATABASE_BACKEND, "OPTIONS": {"using": "sqlite"}},
    "sqlite_orm": {
        "BACKEND": DATABASE_BACKEND,
        "KEY_PREFIX": "distlock-orm",
        "OPTIONS": {"using": "sqlite", "server_functions": False},
    },
    "postgres": {"BACKEND": DATABASE_BACKEND, "OPTIONS": {"using": "default"}},
    "postgres_orm": {
        "BACKEND": DATABASE_BACKEND,
        "KEY_PREFIX": "distlock-orm",
        "OPTIONS": {"using": "default", "server_functions": False},
    },
    "redis": {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": REDIS_URL}},
    "redis_cluster": {
        "BACKEND": REDIS_BACKEND,
        "OPTIONS": {"client_factory": "tests.contract.redis_clients.cluster"},
    },
    "advisory": {
        "BACKEND": "django_distlock.backends.advisory.AdvisoryBackend",
        # Some tests hold more locks at once than the default allows.
        "OPTIONS": {"using": "default", "max_connections": 40},
    },
}
if "mariadb" in DATABASES:
    DISTLOCK["mariadb"] = {"BACKEND": DATABASE_BACKEND, "OPTIONS": {"using": "mariadb"}}
    DISTLOCK["mariadb_orm"] = {
        "BACKEND": DATABASE_BACKEND,
        "KEY_PREFIX": "distlock-orm",
        "OPTIONS": {"using": "mariadb", "server_functions": False},
    }
