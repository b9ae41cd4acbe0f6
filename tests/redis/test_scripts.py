"""Scripts: the server may forget them, touches what it was told of, and nobody is kept waiting."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import RedisCluster

from django_distlock.core.records import Grant
from tests.contract.helpers import take
from tests.contract.redis_clients import cluster_url, logged_in
from tests.contract.stores_redis import RedisStore
from tests.keeper import Server

from .asking import Interrupted, tell_story
from .servers import backend_on

#: What a script may run that has no key.
KEYLESS = {"TIME", "PUBLISH"}


def test_forgotten_scripts_are_sent_again(backend: Any, client: Any, key: str) -> None:
    """Every operation works when the server has just forgotten all scripts."""
    flushed: list[Any] = []
    interrupted = Interrupted(backend, lambda: flushed.append(client.script_flush()))
    tell_story(interrupted, key)
    assert len(flushed) > 30


def test_forgotten_script_keeps_nothing_of_its_caller(backend: Any, client: Any, key: str) -> None:
    """The error is gone with the answer: a lease that is dropped waits for no garbage collector."""

    class Argument(str):
        __slots__ = ("__weakref__",)

    gc.disable()
    try:
        client.script_flush()
        argument = Argument(key)
        gone = weakref.ref(argument)
        assert backend.read(argument) is None
        del argument
        assert gone() is None
    finally:
        gc.enable()


def test_forgotten_scripts_are_sent_again_to_a_cluster(
    on_cluster: RedisStore, alone_on_cluster: Any, key: str
) -> None:
    """The same on the servers of a cluster."""
    interrupted = Interrupted(alone_on_cluster, on_cluster.client.script_flush)
    tell_story(interrupted, key)


def test_scripts_forgotten_at_any_moment_do_no_harm(
    backend: Any, client: Any, private: Server, key: str
) -> None:
    """While the server forgets time and again, no answer is lost, also in the middle of many."""
    grants = [take(backend, f"{key}-{number}") for number in range(40)]
    with _forgetting(client):
        for _ in range(30):
            answers = backend.extend_many(grants)
            assert all(isinstance(answer, Grant) for answer in answers)
            assert len(backend.list(key, limit=100).records) == 40
    assert all(backend.release(grant) for grant in grants)


@contextmanager
def _forgetting(client: Any) -> Iterator[None]:
    done = threading.Event()

    def forget() -> None:
        while not done.wait(0.0005):
            client.script_flush()

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_known_script_is_one_command(backend: Any, client: Any, key: str) -> None:
    """An attempt, also a contended one, is one command, however often it is made."""
    held = take(backend, key)
    client.config_resetstat()
    for _ in range(5):
        backend.acquire(key, held.token[::-1], 30)
    backend.extend(held)
    backend.release(held)
    stats = client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 7
    # Two of the scripts were new to the server.
    assert stats["cmdstat_eval"]["calls"] == 2


def test_scripts_touch_only_the_keys_they_declare(backend: Any, client: Any, key: str) -> None:
    """Each command inside a script is about one of the keys that were given to the script.

    And nothing makes the server look at all its keys at once.
    """
    declared: set[str] = set()
    ran: list[str] = []
    touched = 0
    for source, (command, *words) in _watched(client, lambda: tell_story(backend, key)):
        ran.append(command)
        if source != "lua":
            number = int(words[1]) if command.startswith("EVAL") else 0
            declared = set(words[2 : 2 + number])
        elif command not in KEYLESS:
            assert words[0] in declared, (command, words, declared)
            touched += 1
    assert touched > 50
    assert "SCAN" in ran
    assert not {"KEYS", "FLUSHALL", "FLUSHDB", "RANDOMKEY", "WAIT"} & {*ran}


def _watched(client: Any, run: Callable[[], None]) -> list[tuple[str, list[str]]]:
    """Return which commands the server ran meanwhile, each with where it came from."""
    heard: list[tuple[str, list[str]]] = []
    with client.monitor() as monitor:
        run()
        client.echo("the end")
        while not heard or heard[-1][1] != ["ECHO", "the end"]:
            line = str(monitor.connection.read_response())
            told = re.match(r"[\d.]+ \[\d+ ([^\]]*)\] (.*)", line, re.DOTALL)
            assert told
            heard.append((told[1], re.findall(r'"((?:[^"\\]|\\.)*)"', told[2])))
    return heard


def documented() -> list[str]:
    """Return the rights that docs/howto/use-redis.md names."""
    page = (Path(__file__).parents[2] / "docs/howto/use-redis.md").read_text(encoding="utf-8")
    sentence = page.partition("A user of the ACL needs ")[2].partition("`INFO`")[0]
    rights, *commands = re.findall(r"`([^`]*)`", sentence)
    # The last two redis-py asks for when it connects, and does not need.
    words = [*(word for part in commands for word in part.split()), "client", "hello"]
    return [*rights.split(), *(f"+{each}" for each in words)]


@pytest.mark.parametrize("prefix", [None, "", "shop:locks", "[a*?]"])
def test_few_rights_suffice(private: Server, client: Any, key: str, prefix: str | None) -> None:
    """Those that are documented; or all on `KEY_PREFIX:*`, and nothing dangerous."""
    pattern = re.sub(r"([*?\[\]])", r"\\\1", prefix) + ":*" if prefix else "*"
    given = [f"~{pattern}", f"&{pattern}", "+@all", "-@dangerous", "-@admin"]
    rights = documented() if prefix is None else given
    client.execute_command("ACL SETUSER", "locker", "on", ">secret", *rights)
    more: Any = {} if prefix is None else {"key_prefix": prefix}
    url = private.url.replace("//", "//locker:secret@").replace("/0", "/1")
    backend = backend_on(url, **more)
    tell_story(backend, key)
    assert backend.counts().counters.number > 0
    assert backend.states(5)[0].held.number == 0
    assert sum(backend.store.of_each_server("DBSIZE").values()) > 0
    # How much memory is used is told where that may be asked.
    assert {each["object"] for each in client.execute_command("ACL LOG")} == {"info"}


def test_few_rights_suffice_on_a_cluster(on_cluster: RedisStore, key: str) -> None:
    """Those that are documented, also to learn which server has which keys."""
    user, everywhere = f"locker-{key}", {"target_nodes": RedisCluster.ALL_NODES}
    # Other tests have keys on this cluster.
    rights = ["on", ">secret", *(each.replace("distlock:", f"{key}:") for each in documented())]
    on_cluster.client.execute_command("ACL SETUSER", user, *rights, **everywhere)
    url = logged_in(cluster_url(), user)
    options = {"client_factory": lambda: RedisCluster.from_url(url)}
    try:
        tell_story(backend_on(options=options, key_prefix=key), key)
    finally:
        on_cluster.client.execute_command("ACL DELUSER", user, **everywhere)
