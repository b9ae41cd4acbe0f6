"""Settings: a closed vocabulary, checked when first needed, copied."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps

from django_distlock import conf
from django_distlock.conf import BackendConfig, HolderConfig
from django_distlock.core.retry import Retry
from django_distlock.database.sql import FUNCTIONS, function_name
from django_distlock.exceptions import InvalidLockBackend

MEMORY = "django_distlock.backends.memory.MemoryBackend"


def read(settings: Any, alias: str = "x", **configured: Any) -> BackendConfig:
    """Read one alias with these settings."""
    settings.DISTLOCK = {alias: {"BACKEND": MEMORY, **configured}}
    return conf.backend_config(alias)


def refusal(settings: Any, **configured: Any) -> str:
    """Give the message that settings are refused with."""
    with pytest.raises(InvalidLockBackend) as caught:
        read(settings, **configured)
    return str(caught.value)


def test_no_setting_means_the_database_backend(settings: Any) -> None:
    """A project that configures nothing gets one alias, on its database."""
    del settings.DISTLOCK
    assert conf.aliases() == ["default"]
    path = "django_distlock.backends.database.DatabaseBackend"
    assert conf.backend_config("default") == BackendConfig(backend=path)


def test_defaults_are_those_of_the_documentation(settings: Any) -> None:
    """What is left out has its documented value."""
    assert read(settings) == BackendConfig(
        alias="x",
        backend=MEMORY,
        key_prefix="distlock",
        ttl=30.0,
        wait=5.0,
        max_ttl=604_800.0,
        lock_connections=4,
        retry=Retry(delay=0.1, factor=2.0, cap=1.0, max_retries=None),
        fence_floor=None,
        options={},
    )


def test_every_setting_is_read(settings: Any) -> None:
    """Each name reaches its attribute."""
    config = read(
        settings,
        KEY_PREFIX="app",
        TTL=timedelta(minutes=1),
        WAIT=None,
        MAX_TTL=60,
        LOCK_CONNECTIONS=2,
        RETRY={"delay": timedelta(seconds=0.2), "cap": timedelta(seconds=5), "max_retries": 3},
        FENCE_FLOOR="clock",
        OPTIONS={"using": "other"},
    )
    assert config == BackendConfig(
        alias="x",
        backend=MEMORY,
        key_prefix="app",
        ttl=60.0,
        wait=None,
        max_ttl=60.0,
        lock_connections=2,
        retry=Retry(delay=0.2, cap=5.0, max_retries=3),
        fence_floor="clock",
        options={"using": "other"},
    )


BAD_VALUES: list[tuple[str, object, str]] = [
    ("BACKEND", None, "BACKEND must be the import path of a backend, not None"),
    ("BACKEND", dict, "BACKEND must be the import path of a backend, not <class 'dict'>"),
    ("KEY_PREFIX", 5, "KEY_PREFIX: must be a str, not 5"),
    ("KEY_PREFIX", None, "KEY_PREFIX: must be a str, not None"),
    ("TTL", 0.05, "TTL (seconds) must be at least 0.1 and finite, not 0.05"),
    ("TTL", True, "TTL (seconds) must be a number, not True"),
    ("TTL", None, "TTL (seconds) must be a number, not None"),
    ("TTL", "30", "TTL (seconds) must be a number, not '30'"),
    ("TTL", math.nan, "TTL (seconds) must be at least 0.1 and finite, not nan"),
    ("TTL", 604_801, "TTL (604801 s) is above MAX_TTL (604800 s)"),
    ("WAIT", -1, "WAIT (seconds) must be at least 0 and finite, not -1"),
    ("WAIT", False, "WAIT (seconds) must be a number, not False"),
    ("WAIT", math.inf, "WAIT (seconds) must be at least 0 and finite, not inf"),
    ("MAX_TTL", 0, "MAX_TTL (seconds) must be at least 0.1 and at most 3.2e+09"),
    ("MAX_TTL", 1e10, "MAX_TTL (seconds) must be at least 0.1 and at most 3.2e+09"),
    ("MAX_TTL", None, "MAX_TTL (seconds) must be a number, not None"),
    ("MAX_TTL", 10, "TTL (30 s) is above MAX_TTL (10 s)"),
    ("LOCK_CONNECTIONS", 0, "LOCK_CONNECTIONS: must be an int of at least 1, not 0"),
    ("LOCK_CONNECTIONS", True, "LOCK_CONNECTIONS: must be an int of at least 1, not True"),
    ("LOCK_CONNECTIONS", 2.0, "LOCK_CONNECTIONS: must be an int of at least 1, not 2.0"),
    ("FENCE_FLOOR", "server", "FENCE_FLOOR: must be \"clock\" or None, not 'server'"),
    ("FENCE_FLOOR", True, 'FENCE_FLOOR: must be "clock" or None, not True'),
    ("HEARTBEAT", 0, "HEARTBEAT must be at least 0.01 and at most 0.5, not 0"),
    ("HEARTBEAT", 0.6, "HEARTBEAT must be at least 0.01 and at most 0.5, not 0.6"),
    ("HEARTBEAT", True, "HEARTBEAT must be a number, not True"),
    ("RETRY", None, "RETRY: must be a dictionary, not None"),
    ("RETRY", Retry(), "RETRY: must be a dictionary, not Retry("),
    ("RETRY", {"dely": 1}, "RETRY: unknown: 'dely'; known: delay, factor, cap"),
    ("RETRY", {"delay": 0}, "RETRY: delay must be at least 0.001 and finite, not 0"),
    ("RETRY", {"cap": 0.01}, "RETRY: cap must be at least 0.1 and finite, not 0.01"),
    ("RETRY", {"max_retries": -1}, "RETRY: max_retries must be at least 0, not -1"),
    ("OPTIONS", None, "OPTIONS: must be a dictionary of options, not a NoneType"),
    ("OPTIONS", {1: 2}, "OPTIONS: must have names that are a str, not 1"),
    ("OPTIONS", [("using", "x")], "OPTIONS: must be a dictionary of options"),
]


def test_bad_value_is_refused_with_alias_name_value_and_rule(settings: Any) -> None:
    """Who reads the message knows what to change, where, and to what."""
    for name, value, rule in BAD_VALUES:
        message = refusal(settings, **{name: value})
        assert message.startswith("DISTLOCK['x']: ")
        assert rule in message


def test_unknown_name_is_refused_with_the_known_ones(settings: Any) -> None:
    """The vocabulary is closed: a slip, or a setting of a later version, is no silence."""
    nearest = {"ttl": "TTL", "KEY_PREFIX ": "KEY_PREFIX", "HEART_BEAT": "HEARTBEAT"}
    names: list[Any] = [*nearest, "TIMEOUT", "LOCATION", 5]
    for name in names:
        settings.DISTLOCK = {"x": {"BACKEND": MEMORY, name: 1}}
        with pytest.raises(InvalidLockBackend) as caught:
            conf.backend_config("x")
        near = f" Did you mean {nearest[name]!r}?" if name in nearest else ""
        assert str(caught.value) == (
            f"DISTLOCK['x']: Unknown settings: {name!r}. Known settings: BACKEND, KEY_PREFIX, TTL,"
            f" WAIT, MAX_TTL, HEARTBEAT, LOCK_CONNECTIONS, RETRY, FENCE_FLOOR, OPTIONS.{near}"
        )


def test_backend_without_an_alias_or_an_alias_without_a_backend(settings: Any) -> None:
    """Each is told as what it is."""
    settings.DISTLOCK = {"BACKEND": MEMORY}
    with pytest.raises(InvalidLockBackend, match=r'\{"default": \{"BACKEND": …\}\}'):
        conf.backend_config("default")
    settings.DISTLOCK = {"x": {"TTL": 5}}
    with pytest.raises(InvalidLockBackend, match=r"DISTLOCK\['x'\]: BACKEND is missing"):
        conf.backend_config("x")


def test_setting_of_an_alias_is_sent_there(settings: Any) -> None:
    """It is no setting of ours by itself, nor a slip of one."""
    settings.DISTLOCK_TTL = 60
    with pytest.raises(InvalidLockBackend, match=r"TTL belongs in DISTLOCK\['default'\]\. Known"):
        conf.refuse_unknown_settings()


def test_setting_must_be_a_dictionary(settings: Any) -> None:
    """`DISTLOCK` and each alias are dictionaries."""
    values: list[object] = [None, [], "default", 5]
    for value in values:
        settings.DISTLOCK = value
        with pytest.raises(InvalidLockBackend, match="DISTLOCK must be a dictionary, not "):
            conf.aliases()
        settings.DISTLOCK = {"x": value}
        with pytest.raises(InvalidLockBackend, match=r"DISTLOCK\['x'\] must be a dictionary, not "):
            conf.backend_config("x")


def test_alias_must_be_a_text(settings: Any) -> None:
    """Messages and commands name it."""
    for alias in (None, 1, b"x", ("a",)):
        settings.DISTLOCK = {alias: {"BACKEND": MEMORY}}
        with pytest.raises(InvalidLockBackend, match="An alias in DISTLOCK must be a str, not "):
            conf.aliases()


def test_mistake_in_one_alias_leaves_the_others_alone(settings: Any) -> None:
    """Only the alias that is asked for is read."""
    settings.DISTLOCK = {"bad": {"BACKEND": MEMORY, "TTL": 0}, "good": {"BACKEND": MEMORY}}
    assert conf.aliases() == ["bad", "good"]
    assert conf.backend_config("good").alias == "good"


def test_projects_dictionaries_are_neither_changed_nor_kept(settings: Any) -> None:
    """Reading changes nothing, and changing the settings afterwards changes no configuration."""
    raw = {"x": {"BACKEND": MEMORY, "RETRY": {"delay": 0.2}, "OPTIONS": {"using": "a"}}}
    before = copy.deepcopy(raw)
    settings.DISTLOCK = raw
    config = conf.backend_config("x")
    assert raw == before
    raw["x"]["OPTIONS"]["using"] = "b"  # type: ignore[index]
    assert config.options == {"using": "a"}


TABLES = {
    "locks": "django_distlock_heldlock",
    "fences": "django_distlock_fencecounter",
    "events": "django_distlock_lockevent",
    "waiters": "django_distlock_waiter",
    "seen": "django_distlock_seenfence",
    "notes": "django_distlock_runnote",
    "failed": "django_distlock_failedtask",
    "responses": "django_distlock_storedresponse",
}


def test_tables_may_be_named_one_by_one(settings: Any) -> None:
    """What `DISTLOCK_TABLES` leaves out keeps its default."""
    # The last one leaves room for the names of functions and constraints.
    some = {"fences": "F", "events": "_e"}
    for custom in ({}, {"locks": "app_locks"}, some, {"events": "e" * 48}):
        settings.DISTLOCK_TABLES = custom
        assert {name: conf.table(name) for name in TABLES} == {**TABLES, **custom}


def test_bad_tables_are_refused(settings: Any) -> None:
    """Table names are identifiers, short enough, known, and different."""
    for tables, message in (
        ({"lock": "a"}, "DISTLOCK_TABLES: Unknown settings: 'lock'. Known settings: locks, fences"),
        ({"locks": ""}, "DISTLOCK_TABLES['locks'] must be an identifier, not ''"),
        ({"locks": None}, "DISTLOCK_TABLES['locks'] must be an identifier, not None"),
        ({"fences": "a b"}, "DISTLOCK_TABLES['fences'] must be an identifier, not 'a b'"),
        ({"fences": 'a"b'}, "must be an identifier"),
        ({"fences": "1a"}, "must be an identifier"),
        ({"fences": "a\n"}, "must be an identifier"),
        ({"events": "é"}, "must be an identifier"),
        ({"events": "e" * 49}, "DISTLOCK_TABLES['events'] has 49 characters, more than 48"),
        ({"locks": "e" * 44}, "DISTLOCK_TABLES['locks'] has 44 characters, more than 43"),
        ({"fences": "Fence"}, "DISTLOCK_TABLES['fences'] must not be the name of a column"),
        ({"locks": "dl", "events": "dl_Session"}, "must name different tables"),
        ({"locks": "same", "fences": "same"}, "must name different tables"),
        ({"locks": "Same", "fences": "sAME"}, "must name different tables"),
        ({"locks": "django_distlock_fencecounter"}, "must name different tables"),
        (None, "DISTLOCK_TABLES must be a dictionary, not None"),
        (["a"], "DISTLOCK_TABLES must be a dictionary, not ['a']"),
    ):
        settings.DISTLOCK_TABLES = tables
        for name in TABLES:
            with pytest.raises(InvalidLockBackend) as caught:
                conf.table(name)
            assert message in str(caught.value)


def test_names_of_columns_are_known() -> None:
    """And no function's name is cut off by PostgreSQL."""
    models = apps.get_app_config("django_distlock").get_models()
    assert {each.column for model in models for each in model._meta.local_fields} == conf.COLUMNS
    longest = max(len(function_name(each)) for each in FUNCTIONS) - len(conf.table("locks"))
    assert conf._MAX_LOCKS_NAME + longest == 63


def test_holder_is_read(settings: Any) -> None:
    """Prefix and process are optional."""
    for raw, expected in (
        ({}, HolderConfig("", None)),
        ({"prefix": "eu-"}, HolderConfig("eu-", None)),
        ({"process": "worker@1"}, HolderConfig("", "worker@1")),
        ({"prefix": "eu-", "process": None}, HolderConfig("eu-", None)),
    ):
        settings.DISTLOCK_HOLDER = raw
        assert conf.holder_config() == expected


def test_fences_are_signed_with_the_projects_key(settings: Any) -> None:
    """Without a secret of their own, and what was signed with earlier keys is believed."""
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "now", ["before", "earlier"]
    assert conf.fence_secrets() == ("now", "before", "earlier")
    settings.DISTLOCK_FENCE_SECRET = None
    assert conf.fence_secrets() == ("now", "before", "earlier")


SECRET = "16 characters of"


def test_secret_of_fences_stands_alone(settings: Any) -> None:
    """The project's keys are none of fences then; of several the first signs, each is believed."""
    settings.DISTLOCK_FENCE_SECRET = SECRET
    assert conf.fence_secrets() == (SECRET,)
    settings.DISTLOCK_FENCE_SECRET = [f"newer {SECRET}", SECRET]
    assert conf.fence_secrets() == (f"newer {SECRET}", SECRET)


WRONG_SECRET = (
    "DISTLOCK_FENCE_SECRET must be None, or a str of at least 16 characters, or a list of such."
)


#: By the name of the setting: what reads it, and the rule that each value breaks.
BAD_SETTINGS: dict[str, tuple[Callable[[], object], list[tuple[Any, str]]]] = {
    "HOLDER": (
        conf.holder_config,
        [
            ({"host": "x"}, "Unknown settings: 'host'. Known settings: prefix, process"),
            ({"prefix": None}, "['prefix'] must be a str, not None"),
            ({"prefix": 5}, "['prefix'] must be a str, not 5"),
            ({"process": 5}, "['process'] must be a str, not 5"),
            # No record may be refused for it.
            ({"prefix": "a\0"}, "['prefix']"),
            ({"process": "\ud800"}, "['process']"),
            (None, "must be a dictionary, not None"),
        ],
    ),
    # An empty one would be everybody's, and a short one is guessed from one header.
    "FENCE_SECRET": (
        conf.fence_secrets,
        [
            (raw, WRONG_SECRET)
            for raw in (
                *("", "hidden", SECRET[:15], 5, b"b" * 16),
                *([], [SECRET, "hidden"], {SECRET: 1}, True),
            )
        ],
    ),
    "FENCE_AUDIENCE": (
        conf.fence_audiences,
        [(raw, " 1 to 100") for raw in ("", 5, [], ["ledger", ""], "led\nger", "l" * 101)],
    ),
    "FENCE_JUMP": (
        conf.fence_jump,
        [(raw, " must be None, or an int") for raw in (0, -1, 1.5, True, "5", 900_000_000_000_001)],
    ),
    "HISTORY": (
        conf.history,
        [(raw, " must be ") for raw in (-0.1, 1.1, True, "1", float("nan"))],
    ),
    "TASK_URL": (
        lambda: conf.task_url("a"),
        [
            (raw, " and contains {task_id}, not ")
            for raw in ("", 5, "https://flower.example", "javascript:{task_id}", "task/{task_id}")
        ],
    ),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_setting_is_refused_and_named(settings: Any, name: str) -> None:
    """Who reads the message knows which one it is, and what it has to be; no secret is shown."""
    read, values = BAD_SETTINGS[name]
    for bad, message in values:
        setattr(settings, f"DISTLOCK_{name}", bad)
        with pytest.raises(InvalidLockBackend) as caught:
            read()
        told = str(caught.value)
        assert told.startswith(f"DISTLOCK_{name}")
        assert message in told
        assert told == message or message is not WRONG_SECRET


def test_audiences_of_fences(settings: Any) -> None:
    """One name, several, or none: in a list None stands for headers that name nobody."""
    assert conf.fence_audiences() == (None,)
    assert conf.fence_jump() is None
    for raw, audiences in [("ledger", ("ledger",)), (["ledger", None], ("ledger", None))]:
        settings.DISTLOCK_FENCE_AUDIENCE = raw
        assert conf.fence_audiences() == audiences
