"""What breaks between a process and its wake-ups: waiters are told, and hear again later."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from django_distlock.backends import listening
from tests.contract.helpers import Later, contend, take
from tests.keeper import Server, free_port

from .hearing import Waiter, Warned, hand_over, subscriptions, threads, waiting
from .servers import (
    PATIENCE,
    SILENCE,
    Proxy,
    backend_on,
    eventually,
    restartable,
    stopped,
    with_query,
)

pytestmark = pytest.mark.faults

LOGIN = ("on", ">secret", "~*", "&*", "+@all")


def locker_on(server: Server, client: Any, *rights: str) -> Any:
    """Make a backend whose user has rights."""
    client.execute_command("ACL SETUSER", "locker", *rights)
    return backend_on(server.url.replace("//", "//locker:secret@"))


def test_killed_connection_comes_back(backend: Any, client: Any, key: str, warned: Warned) -> None:
    """Waiters are rung when it breaks, to ask again and again, and when it is there again."""
    with waiting(backend, key) as waiter:
        for round_ in (1, 2):
            waiter.rung.clear()
            assert client.client_kill_filter(_type="pubsub") == 1
            eventually(lambda: waiter.rung == [False, True], "it comes back")
            assert backend.is_listening
            assert len(warned()) == round_
            hand_over(backend, backend, waiter, key)
    assert all(each.startswith("distlock-redis-wakeups cannot hear") for each in warned())


def test_server_that_is_started_again(
    key: str, warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is away there is one warning, however often it is asked; then all is well."""
    monkeypatch.setattr(listening, "LONGEST_PAUSE", 0.05)
    with restartable() as server:
        backend = backend_on(server.url)
        asked = count_subscriptions(backend)
        with waiting(backend, key) as waiter:
            server.kill()
            eventually(lambda: waiter.rung == [False], "waiters are told")
            eventually(lambda: len(asked) > 5, "the server is asked again and again")
            assert backend.listen() is False
            server.start()
            eventually(lambda: waiter.rung == [False, True], "wake-ups are heard again")
            hand_over(backend, backend, waiter, key)
        assert len(warned()) == 1


def count_subscriptions(backend: Any) -> list[int]:
    """Return what grows with each attempt to subscribe."""
    asked: list[int] = []
    subscribe: Callable[[], Any] = backend._listener._subscribe

    def counted() -> Any:
        asked.append(1)
        return subscribe()

    backend._listener._subscribe = counted
    return asked


@pytest.mark.usefixtures("restless")
def test_server_that_hangs_is_noticed(
    private: Server, client: Any, key: str, warned: Warned
) -> None:
    """A connection on which nothing comes, not even an answer, wakes nobody: waiters are told."""
    backend = backend_on(with_query(private.url, socket_timeout=SILENCE))
    with waiting(backend, key) as waiter:
        with stopped(client):
            eventually(lambda: waiter.rung == [False], "waiters are told")
            assert backend.listen() is False
        eventually(lambda: waiter.rung == [False, True], "wake-ups are heard again")
        hand_over(backend, backend, waiter, key)
    (warning,) = warned()
    assert "Silent for 0.3 s" in warning


@pytest.mark.usefixtures("restless")
def test_words_that_get_lost_are_noticed(private: Server, key: str, warned: Warned) -> None:
    """The same where the server is there, and only the way to it is not."""
    with Proxy(private.url) as line:
        backend = backend_on(with_query(line.url, socket_timeout=SILENCE))
        with waiting(backend, key) as waiter:
            line.replies = "lost"
            eventually(lambda: waiter.rung == [False, True], "another connection hears")
            hand_over(backend_on(private.url), backend, waiter, key)
    assert len(warned()) == 1


def test_nobody_listens_at_the_address(key: str, warned: Warned) -> None:
    """That is told at once, with the reason and no password, and nobody is kept waiting."""
    backend = backend_on(f"redis://:pass-word@127.0.0.1:{free_port()}/0")
    waiter = Waiter(backend, key)
    assert Later(backend.listen, 600).result() is False
    waiter.leave()
    backend._listener.close_all()
    (warning,) = warned()
    assert "refused" in warning
    assert "pass-word" not in warning


@pytest.mark.parametrize("right", ["resetchannels", "-subscribe", "-ping"])
def test_user_who_may_not_subscribe(
    private: Server, client: Any, key: str, warned: Warned, right: str
) -> None:
    """One warning names the channel and the right; the server is not asked again and again."""
    backend = locker_on(private, client, *LOGIN, right)
    asked = count_subscriptions(backend)
    waiter = Waiter(backend, key)
    for _ in range(3):
        assert Later(backend.listen, 600).result() is False
    assert backend.is_listening is False
    assert len(asked) == 1
    (warning,) = warned()
    assert "'distlock:wake'" in warning
    assert "ACL SETUSER … &distlock:wake +subscribe +ping" in warning
    # Whoever waits asks again by himself: with another right of the user, all else works.
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    assert backend.release(grant) is True
    assert waiter.rung == [False]
    Later(backend._listener.close_all).result()


def test_right_that_is_taken_away(private: Server, client: Any, key: str, warned: Warned) -> None:
    """The server closes the connection then; waiters are told, and there is one warning."""
    backend = locker_on(private, client, *LOGIN)
    with waiting(backend, key) as waiter:
        client.execute_command("ACL SETUSER", "locker", "resetchannels")
        eventually(lambda: waiter.rung, "waiters are told")
        assert backend.listen(PATIENCE) is False
    assert len(warned()) == 1


def test_words_of_strangers_do_no_harm(
    private: Server, backend: Any, client: Any, key: str, warned: Warned
) -> None:
    """What is no name of a key, or of none that anybody waits for, is passed over."""
    with waiting(backend, key) as waiter:
        for word in (b"\xff\xfe", b"", b"a" * 100_000, b"{}:", key.encode()):
            assert client.publish("distlock:wake", word) == 1
        hand_over(backend, backend, waiter, key)
        assert waiter.rung == [True]
    assert warned() == []


@pytest.mark.parametrize("how", ["tcp", "unix"])
def test_close_is_prompt(
    backend: Any,
    client: Any,
    key: str,
    warned: Warned,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """In the middle of a silence, from another thread; and nothing is left open."""
    monkeypatch.setattr(listening, "LOOK_SECONDS", 600)
    if how == "unix":
        backend = backend_on(f"unix://{client.config_get('unixsocket')['unixsocket']}")
    with waiting(backend, key) as waiter:
        assert subscriptions(client) == 1
        waiter.rung.clear()
        Later(backend._listener.close_all).result()
        eventually(lambda: threads(backend) == 0, "the thread has ended")
        eventually(lambda: subscriptions(client) == 0, "the connection is closed")
        assert waiter.rung == [False]
        assert backend.listen(PATIENCE)
        hand_over(backend, backend, waiter, key)
    assert warned() == []


def test_closed_subscription_stays_closed(backend: Any, client: Any) -> None:
    """Whoever hears in another thread is told; nobody connects again without a subscription."""
    line = backend.store.subscribed("distlock:wake")
    hearing = Later(line.hear, 600)
    eventually(line._using.locked, "somebody hears")
    Later(line.close).result()
    with pytest.raises(RedisConnectionError):
        hearing.result()
    line.close()
    assert line._connection._sock is None
    with pytest.raises(RedisConnectionError, match="over"):
        line.hear(0)
    eventually(lambda: subscriptions(client) == 0, "the connection is closed")


def test_subscription_that_broke_stays_broken(backend: Any, client: Any) -> None:
    """It neither hears again nor connects again: whoever wants to hear opens another."""
    line = backend.store.subscribed("distlock:wake")
    assert client.client_kill_filter(_type="pubsub") == 1
    with pytest.raises(RedisConnectionError):
        line.hear(PATIENCE)
    with pytest.raises(RedisConnectionError, match="over"):
        line.hear(PATIENCE)
    line.close()
    assert subscriptions(client) == 0


@pytest.mark.usefixtures("restless")
def test_connection_of_nobody_is_closed(
    backend: Any, client: Any, key: str, warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some time after the last waiter has left; the next one opens another."""
    monkeypatch.setattr(listening, "IDLE_SECONDS", 0.2)
    for _ in range(2):
        waiter = Waiter(backend, key)
        assert backend.listen(PATIENCE)
        hand_over(backend, backend, waiter, key)
        waiter.leave()
        eventually(lambda: threads(backend) == 0, "nobody listens any more")
        assert backend.is_listening is False
        eventually(lambda: subscriptions(client) == 0, "the connection is closed")
    assert warned() == []


def test_forked_child_listens_for_itself(private: Server, client: Any, key: str) -> None:
    """On a connection of its own; the parent's goes on, also behind the child's end."""
    backend = backend_on(private.url)
    with waiting(backend, key) as waiter:
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            _in_child(backend, f"{key}-child", tell)
        assert os.read(told, 1) == b"r"
        assert subscriptions(client) == 2
        hand_over(backend, backend, waiter, key)
        os.kill(child, signal.SIGUSR1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        eventually(lambda: subscriptions(client) == 1, "the child's connection is closed")
        hand_over(backend, backend, waiter, key)
        assert all(waiter.rung)
        for each in (told, tell):
            os.close(each)


def _in_child(backend: Any, key: str, tell: int) -> None:
    """Be the child: nobody waits here yet; then wait, hear, and end without a word."""
    signal.alarm(PATIENCE)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    status = 1
    try:
        assert backend.is_listening is False
        assert len(backend.queues) == 0
        with waiting(backend, key) as waiter:
            hand_over(backend, backend, waiter, key)
            os.write(tell, b"r")
            signal.sigwait([signal.SIGUSR1])
        status = 0
    finally:
        os._exit(status)
