"""The sessions of locks that last for a session: few, watched, and nobody else's."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import connections
from django.db.backends.base.base import NO_DB_ALIAS
from django.test import override_settings

from django_distlock import BackendUnavailable, LockLost, distlock
from django_distlock.backends.advisory import AdvisoryBackend
from django_distlock.backends.advisory import session as sessions_module
from django_distlock.backends.advisory.session import Session
from django_distlock.core.keys import new_token
from django_distlock.core.records import UNKNOWN, Contended, Grant
from django_distlock.database import connections as distlock_connections
from django_distlock.handler import lock_backends
from django_distlock.signals import lock_lost
from tests.backends import ADVISORY
from tests.contract.aliases import alias_like, in_a_fork
from tests.contract.helpers import Later, at_once, contend, extend, held, prompt, take, there
from tests.contract.interrupting import interrupt_at, strike_again_and_again
from tests.contract.locking import Heard, eventually
from tests.processes import spawn
from tests.salted import SESSIONS, number_of

from .databases import ask, migrate, new_database, server
from .wires import wire


@contextmanager
def advisory(using: str = "default", **options: Any) -> Iterator[AdvisoryBackend]:
    """Configure a lock backend of this kind, and close its sessions at the end."""
    configured = {"BACKEND": ADVISORY, "OPTIONS": {"using": using, **options}}
    with override_settings(DISTLOCK={"session": configured}):
        backend = lock_backends["session"]
        assert isinstance(backend, AdvisoryBackend)
        try:
            yield backend
        finally:
            backend._sessions.close_all()
            backend._connections.close_all()


@pytest.fixture
def backend() -> Iterator[AdvisoryBackend]:
    """Give a backend of its own to the test."""
    with advisory() as made:
        yield made


def session_of(backend: AdvisoryBackend, grant: Grant) -> Session:
    """Return the session that holds a lease."""
    return there(backend._holdings.of_token(grant.token)).session


def live(*pids: int) -> set[int]:
    """Return which of these sessions the server has."""
    rows = ask("default", "SELECT pid FROM pg_stat_activity WHERE pid = ANY(%s)", list(pids))
    return {pid for (pid,) in rows}


def terminate(pid: int) -> None:
    """Let the server end a session, and wait for its end."""
    assert ask("default", "SELECT pg_terminate_backend(%s, 5000)", pid) == [(True,)]


# Whose they are


def test_stranger_with_the_number_of_a_key(backend: AdvisoryBackend, key: str) -> None:
    """It is in the way, but no holder: it is not shown as one, asked to stop or ended."""
    number = number_of("default", backend._name(key))
    grant = take(backend, key)
    assert backend.release(grant) is True
    for named in ("distlock:another key", "psql"):
        with server(connections["default"].settings_dict["NAME"], application_name=named) as raw:
            raw.execute("SELECT pg_advisory_lock(%s)", [number])
            answer = contend(backend, key)
            assert answer.holder is None
            assert backend.read(key) is None
            assert backend.request_stop(key) is None
            assert backend.force_release(key) is None
            assert raw.execute("SELECT pg_advisory_unlock(%s)", [number]).fetchone() == (True,)
    assert take(backend, key).fence > grant.fence


def test_session_that_goes_on_to_another_key_is_not_ended(
    backend: AdvisoryBackend, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the end, what it was granted counts once more."""
    grant = take(backend, key)
    session = session_of(backend, grant)
    move = AdvisoryBackend._move_fence

    def renamed(self: AdvisoryBackend, *arguments: Any) -> Any:
        found = move(self, *arguments)
        with session.mutex:
            ask("default", f"UPDATE {SESSIONS} SET storage_key = 'x' WHERE pid = %s", session.pid)
        return found

    monkeypatch.setattr(AdvisoryBackend, "_move_fence", renamed)
    backend.force_release(key)
    assert live(session.pid) == {session.pid}
    assert backend.is_cut_off(grant) is False


# How many there are


def test_session_is_used_again(backend: AdvisoryBackend, key: str) -> None:
    """The next lock is held by the session that the last one gave back, also another key's."""
    used = set()
    for number in range(4):
        grant = take(backend, f"{key}-{number % 2}")
        used.add(session_of(backend, grant).pid)
        contend(backend, f"{key}-{number % 2}")
        assert backend.release(grant) is True
    # The contender's is the second.
    assert len(used) <= 2
    assert len(backend._sessions._open) == 2


def test_idle_session_is_closed(
    backend: AdvisoryBackend, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare that nobody needs goes; one that holds a lock stays, for as long as that takes."""
    monkeypatch.setattr(distlock_connections, "IDLE_SECONDS", 0.1)
    grants = [take(backend, f"{key}-{name}") for name in "ab"]
    kept, spare = (session_of(backend, grant).pid for grant in grants)
    assert backend.release(grants[1]) is True
    assert eventually(lambda: live(kept, spare) == {kept}, timeout=10)
    assert backend.is_cut_off(grants[0]) is False
    assert backend.release(grants[0]) is True


def test_locks_held_at_once_are_bounded(key: str) -> None:
    """One lock too many is refused at once, by number and remedy; an end makes room."""
    with advisory(max_connections=2) as backend:
        grants = [take(backend, f"{key}-{number}") for number in range(2)]
        for name in (f"{key}-2", f"{key}-0"):
            with prompt(), pytest.raises(BackendUnavailable, match="All 2 sessions") as caught:
                backend.acquire(name, new_token(), 30)
            assert (caught.value.code, caught.value.key) == ("rate_limited", name)
            assert "max_connections" in str(caught.value)
        assert backend.release(grants[0]) is True
        take(backend, f"{key}-2")
        assert len(backend._sessions._open) == 2
        # What the server has ended does not count, also where nobody released it.
        terminate(session_of(backend, grants[1]).pid)
        assert backend.is_cut_off(grants[1]) is True
        take(backend, f"{key}-next")


# psycopg tells of a connection that a signal broke off while it was opened.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. .function BaseConnection:pytest.PytestUnraisableExceptionWarning"
)
def test_signals_leave_the_place_of_a_session_free() -> None:
    """Whoever is interrupted while it takes a session, or puts it back, keeps no place."""
    with advisory(max_connections=1) as backend:

        def work() -> None:
            backend._sessions.put_back(backend._sessions.take())

        assert strike_again_and_again(work, work, seconds=1, most=300)


def put_back(backend: AdvisoryBackend, out: list[Session]) -> None:
    """Put a session back that nobody refers to behind that."""
    backend._sessions.put_back(out.pop())


def test_interruption_at_any_line_leaves_the_place_of_a_session_free() -> None:
    """The first session that is put back starts a thread, which takes a while."""
    line, reached = 0, True
    while reached:
        line += 1
        with advisory(max_connections=1) as backend:
            out = [backend._sessions.take()]
            reached = interrupt_at(line, partial(put_back, backend, out))
            gc.collect()
            backend._sessions.put_back(backend._sessions.take())
    assert line > 5


def test_attempts_take_turns_at_few_sessions(key: str) -> None:
    """More attempts than sessions wait for each other, instead of failing."""
    with advisory(max_connections=2) as backend:
        grant = take(backend, key)
        answers = at_once([partial(backend.acquire, key, new_token(), 30)] * 8)
        assert all(isinstance(each, Contended) and each.fence == grant.fence for each in answers)


def test_waiter_for_a_session_is_told_when_all_hold(key: str) -> None:
    """Who waits for the session of an attempt that is granted waits no longer."""
    with advisory(max_connections=1) as backend:
        session = backend._sessions.take()
        waiting = Later(backend.acquire, f"{key}-b", new_token(), 30)
        time.sleep(0.05)
        backend._sessions.keep_lock(session)
        with prompt(), pytest.raises(BackendUnavailable, match="hold locks"):
            waiting.result()
        backend._sessions.put_back(session)
        take(backend, key)


def test_dropping_the_database_ends_them(key: str) -> None:
    """Held and spare sessions are no obstacle where a test run drops its database."""
    with (
        new_database() as name,
        alias_like("default", NAME=name) as using,
        advisory(using) as backend,
    ):
        migrate(using)
        grants = [take(backend, f"{key}-{number}") for number in range(2)]
        pids = [session_of(backend, grant).pid for grant in grants]
        assert backend.release(grants[1]) is True
        with connections[using]._nodb_cursor():
            assert eventually(lambda: not live(*pids))
        assert backend.is_cut_off(grants[0]) is True
        assert connections[using].alias != NO_DB_ALIAS


# How they are set up


@pytest.mark.parametrize("own", [{}, {"keepalives_idle": 77, "keepalives_count": 9}])
def test_peers_that_vanish_are_noticed(own: dict[str, int], key: str) -> None:
    """Both ends probe a silent connection, as the alias says; none ends one that is idle."""
    idle, count = own.get("keepalives_idle", 10), own.get("keepalives_count", 3)
    with alias_like("default", OPTIONS=own) as using, advisory(using) as backend:
        session = session_of(backend, take(backend, key))
        with socket.socket(fileno=os.dup(session._pgconn.socket)) as ours:
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == idle
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 5
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == count
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000
        settings = {
            "tcp_keepalives_idle": str(idle),
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": str(count),
            "tcp_user_timeout": "25000",
            "idle_session_timeout": "0",
            "default_transaction_isolation": "read committed",
        }
        assert {name: shows(session, name) for name in settings} == settings


def shows(session: Session, setting: str) -> str:
    """Ask a session for a setting."""
    row = there(session._raw.execute(f"SHOW {setting}").fetchone())
    return str(row[0])


def test_isolation_of_the_alias_is_no_obstacle(key: str) -> None:
    """Where transactions begin as SERIALIZABLE, sessions in turn see each other's fences."""
    default = {"options": "-c default_transaction_isolation=serializable"}
    with alias_like("default", OPTIONS=default) as using, advisory(using) as backend:
        session = session_of(backend, take(backend, f"{key}-any"))
        assert shows(session, "transaction_isolation") == "read committed"
        fences = []
        for _ in range(3):
            grants = [
                each
                for each in at_once([partial(backend.acquire, key, new_token(), 30)] * 4)
                if isinstance(each, Grant)
            ]
            assert len(grants) == 1
            fences.append(grants[0].fence)
            assert backend.release(grants[0]) is True
        assert fences == sorted(set(fences))


def test_pool_of_the_alias_is_left_alone(key: str) -> None:
    """D12: sessions come from no pool, so what one holds goes with its release and its end."""
    with (
        alias_like("default", OPTIONS={"pool": {"min_size": 1, "max_size": 2}}) as using,
        advisory(using) as backend,
    ):
        grants = [take(backend, f"{key}-{number}") for number in range(3)]
        pids = [session_of(backend, grant).pid for grant in grants]
        ((pid,),) = ask(using, "SELECT pg_backend_pid()")
        assert pid not in pids
        connections[using].close()
        assert live(*pids) == set(pids)
        assert backend.release(grants[0]) is True
        backend._sessions.close_all()
        assert eventually(lambda: not live(*pids))
        connections[using].close_pool()  # type: ignore[attr-defined]
        for number in range(3):
            take(backend, f"{key}-{number}")


# How their end is seen


def test_check_sees_that_the_server_ended_the_session(backend: AdvisoryBackend, key: str) -> None:
    """D16: without a query, at the next look; the lease stays lost and the key is free."""
    lock = distlock(key, backend="session", wait=5)
    lease = lock.acquire()
    lease.check()
    holding = there(backend._holdings.of_token(lease.token))
    with Heard(lock_lost, key) as heard:
        terminate(holding.session.pid)
        with prompt(), pytest.raises(LockLost, match="no longer has it"):
            lease.check()
        assert (lease.held, lease.is_lost) == (False, True)
        with lock as after:
            assert after.fence > lease.fence
            assert lease.release() is False
        assert heard.once["fence"] == lease.fence


def test_force_release_spares_the_next_grant_of_the_same_session(
    backend: AdvisoryBackend, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder that gives back by itself, and is granted the key again, is another one."""
    first, later = take(backend, key), []
    pid, move = session_of(backend, first).pid, backend._move_fence

    def hand_on(*args: Any) -> Any:
        found = move(*args)
        backend.release(first)
        later.append(take(backend, key))
        return found

    monkeypatch.setattr(backend, "_move_fence", hand_on)
    backend.force_release(key)
    assert session_of(backend, later[0]).pid == pid
    assert isinstance(backend.extend(later[0]), Grant)


def test_operation_on_an_ended_session_finds_the_lease_gone(
    backend: AdvisoryBackend, key: str
) -> None:
    """Who asks before it looked is told as well, and nothing is granted twice."""
    grants, other = [take(backend, f"{key}-{each}") for each in range(4)], take(backend, key)
    for grant in grants:
        terminate(session_of(backend, grant).pid)
    extended, among_others, released, replaced = grants
    assert backend.extend(extended) is None
    answers = backend.extend_many([other, among_others, other])
    assert [type(each) for each in answers] == [Grant, type(None), Grant]
    assert backend.release(released) is False
    for grant in (extended, among_others, released):
        assert take(backend, grant.key).fence > grant.fence
    assert take(backend, replaced.key, replace=replaced.token).fence > replaced.fence
    # One that was ended while it idled costs no error.
    spare = session_of(backend, other).pid
    assert backend.release(other) is True
    terminate(spare)
    assert session_of(backend, take(backend, key)).pid != spare


def test_unlock_that_answers_no_is_a_loss(backend: AdvisoryBackend, key: str) -> None:
    """Where the session held nothing any more, release says so, and extend before it."""
    grants = [take(backend, f"{key}-{name}") for name in "ab"]
    for grant in grants:
        session_of(backend, grant)._raw.execute("SELECT pg_advisory_unlock_all()")
    assert backend.extend(grants[0]) is None
    assert backend.is_cut_off(grants[0]) is True
    assert backend.release(grants[1]) is False


def test_answer_that_does_not_come_is_unknown(key: str) -> None:
    """A server that hangs leaves extends unknown, and the lease as it is once it answers again.

    D16: a connection that breaks on the way is a loss at the next look.
    """
    with wire() as way, alias_like("default", **way.address) as using, advisory(using) as backend:
        grants = [take(backend, f"{key}-{name}") for name in "ab"]
        way.hang()
        with prompt(1):
            assert backend.extend_many(grants) == [UNKNOWN, UNKNOWN]
        assert backend.extend(grants[0]) is UNKNOWN
        assert backend.is_cut_off(grants[0]) is False
        way.flow()
        for grant in grants:
            extended = extend(backend, grant)
            assert extended.fence == grant.fence
        assert backend.release(grants[0]) is True
        way.close()
        assert eventually(lambda: backend.is_cut_off(grants[1]))
        assert backend.release(grants[1]) is False


@pytest.mark.parametrize("operation", ["acquire", "release", "release behind an extend"])
def test_server_that_hangs_is_unavailable(
    key: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer the session is given up, and what it may hold goes with it."""
    monkeypatch.setattr(sessions_module, "ANSWER_SECONDS", 1.5)
    with wire() as way, alias_like("default", **way.address) as using, advisory(using) as backend:
        grant = take(backend, key)
        call: Callable[[], object] = partial(backend.release, grant)
        if operation == "acquire":
            backend.release(grant)
            call = partial(backend.acquire, key, new_token(), 30)
        way.hang()
        if "extend" in operation:
            assert backend.extend(grant) is UNKNOWN
        with pytest.raises(BackendUnavailable) as caught:
            call()
        assert caught.value.code == "network_timeout"
        way.flow()
        # Its session is not used for another key.
        take(backend, f"{key}-next")
        with advisory() as elsewhere:
            assert eventually(lambda: elsewhere.read(key) is None, timeout=10)
            assert take(elsewhere, key).fence > grant.fence


def test_attempt_that_is_interrupted_leaves_nothing_held(
    backend: AdvisoryBackend, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception out of nowhere, such as a time limit's, ends the session of the attempt."""

    class TimeLimitError(BaseException):
        pass

    receive = Session.receive

    def interrupted(self: Session, until: float) -> Any:
        receive(self, until)
        raise TimeLimitError

    with monkeypatch.context() as patch:
        patch.setattr(Session, "receive", interrupted)
        with pytest.raises(TimeLimitError):
            backend.acquire(key, new_token(), 30)
    assert eventually(lambda: backend.read(key) is None)
    take(backend, key)


# Who shares them


def test_look_does_not_wait_for_who_uses_the_session(backend: AdvisoryBackend, key: str) -> None:
    """While a thread asks the server, another one's look answers at once."""
    grant = take(backend, key)
    with session_of(backend, grant).mutex, prompt():
        assert Later(backend.is_cut_off, grant).result() is False


def test_killed_process_frees_its_keys_at_once(backend: AdvisoryBackend, key: str) -> None:
    """No ttl has to pass: the server sees the connection of the dead close."""
    target = "tests.contract.lock_workers:hold_until_told"
    with spawn(target, "advisory", key, 600, "") as worker:
        worker.wait_for("held")
        seen = contend(backend, key)
        assert there(seen.holder).metadata["session"]
        os.kill(worker.popen.pid, signal.SIGKILL)
        assert eventually(lambda: backend.read(key) is None)
        assert take(backend, key).fence > there(seen.fence)


def test_fork_leaves_the_sessions_to_the_parent(key: str) -> None:
    """A child holds nothing of its parent's, and its end disturbs no session."""
    with spawn("tests.integration.test_advisory_sessions:fork", key) as worker:
        said = worker.result()
    assert said == {"child": [None, False, False, True], "parent": [True, True, True]}


def fork(key: str) -> dict[str, Any]:
    """Hold a lock and a spare over a fork; run in a process of its own."""
    backend = lock_backends["advisory"]
    grant, spare = take(backend, key), take(backend, f"{key}-spare")
    backend.release(spare)

    def look() -> dict[str, Any]:
        own = take(backend, f"{key}-child")
        return {
            "child": [
                backend.extend(grant),
                backend.release(grant),
                backend.is_cut_off(grant),
                backend.release(own),
            ]
        }

    said, _status = in_a_fork(look)
    parent = [
        isinstance(backend.extend(grant), Grant),
        held(backend, key).fence == grant.fence,
        backend.release(grant),
    ]
    return {**said, "parent": parent}
