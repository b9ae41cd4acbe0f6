"""What breaks between a process and its wake-ups: waiters are told, and hear again later."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from django_distlock.backends import listening
from tests.contract.helpers import Later, contend, take
from tests.keeper import Server, free_port

from .hearing import Waiter, Warned, hand_over, subscriptions, threads, waiting
from .servers import PATIENCE, SILENCE, backend_on, eventually, stopped, with_query

pytestmark = pytest.mark.faults

LOGIN = ("on", ">secret", "~*", "&*", "+@all")


def test_killed_connection_comes_back(backend: Any, client: Any, key: str, warned: Warned) -> None:
    """Waiters are rung when it breaks, to poll, and when it is there again."""
    with waiting(backend, key) as waiter:
        for round_ in (1, 2):
            waiter.rung.clear()
            assert client.client_kill_filter(_type="pubsub") == 1
            eventually(lambda: waiter.rung == [False, True], "it comes back")
            assert backend.is_listening
            assert len(warned()) == round_
            hand_over(backend, backend, waiter, key)
    assert all(each.startswith("distlock-redis-wakeups cannot receive") for each in warned())


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
    assert "No answer to PING for 2 s" in warning


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
    """One warning names the channel and the right, however often somebody wants to listen."""
    client.execute_command("ACL SETUSER", "locker", *LOGIN, right)
    backend = backend_on(private.url.replace("//", "//locker:secret@"))
    waiter = Waiter(backend, key)
    for _ in range(3):
        assert Later(backend.listen, 600).result() is False
    assert backend.is_listening is False
    (warning,) = warned()
    assert "'distlock:wake'" in warning
    assert "ACL SETUSER … &distlock:wake +subscribe +ping" in warning
    # Whoever waits asks again by himself: with another right of the user, all else works.
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    assert backend.release(grant) is True
    assert waiter.rung == [False]
    Later(backend._listener.close_all).result()
    # Whose right is taken away is told the same: the server closes the connection then.
    client.execute_command("ACL SETUSER", "locker", *LOGIN)
    backend = backend_on(private.url.replace("//", "//locker:secret@"))
    with waiting(backend, key) as heard:
        client.execute_command("ACL SETUSER", "locker", right)
        if right != "resetchannels":
            client.client_kill_filter(_type="pubsub")
        eventually(lambda: heard.rung, "waiters are told")
        assert backend.listen(PATIENCE) is False
    assert len(warned()) == 2


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
    private: Server,
    client: Any,
    key: str,
    warned: Warned,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """In the middle of a silence, from another thread; and nothing is left open."""
    monkeypatch.setattr(listening, "LOOK_SECONDS", 600)
    unix = f"unix://{client.config_get('unixsocket')['unixsocket']}"
    # With a name of its own: other backends of this process may listen as well.
    backend = backend_on(unix if how == "unix" else private.url, alias="prompt")
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


@pytest.mark.parametrize("end", ["closed", "broken"])
def test_subscription_that_ended_stays_ended(backend: Any, client: Any, end: str) -> None:
    """Whoever hears in another thread is told; nobody connects again without a subscription."""
    line = backend.store.subscribed("distlock:wake")
    hearing = Later(line.hear, 600)
    eventually(line._using.locked, "somebody hears")
    if end == "closed":
        Later(line.close).result()
    else:
        assert client.client_kill_filter(_type="pubsub") == 1
    with pytest.raises(RedisConnectionError):
        hearing.result()
    with pytest.raises(RedisConnectionError, match="has ended"):
        line.hear(0)
    line.close()
    assert line._connection._sock is None
    eventually(lambda: subscriptions(client) == 0, "the connection is closed")
