"""Who is gone: processes that really live, stop, die, and hide."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from django_distlock.core.records import Holder
from django_distlock.process.host import current_holder, is_gone
from tests.conftest import DECLARED
from tests.contract.helpers import PATIENCE
from tests.contract.locking import eventually
from tests.processes import Process, spawn, spawn_by

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/ns/pid").exists(), reason=f"{DECLARED}only Linux tells who is gone"
)

#: What a process that is looked at is told, and what it then does.
THERE = "tests.integration.test_host:"
#: Nobody's number, as a user and as a group.
NOBODY = 65534

NAMED = {"process": "beat"}


def said_by(process: Process, path: Path) -> Holder:
    """Wait until a process is there, and give the identity that it took."""
    process.wait_for("there", PATIENCE)
    return Holder.from_json(json.loads(path.read_text()))


@contextmanager
def other_process(
    path: Path, function: str = "stay", *, is_child: bool = False
) -> Iterator[tuple[Process, Holder]]:
    """Run another process; give it and the identity under which it would take locks.

    Args:
        is_child: Whether the test is its parent, which sees it end and waits for it later.
    """
    there, quick = [f"{THERE}{function}", str(path)], {"PYTHONDEVMODE": ""}
    with spawn_by([], *there, **quick) if is_child else spawn(*there) as process:
        yield process, said_by(process, path)


@pytest.fixture(scope="module")
def gone(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Holder:
    """Give the identity of a process that was here and has ended."""
    with other_process(tmp_path_factory.mktemp("gone") / "gone") as (process, holder):
        process.send("end")
        process.result(PATIENCE)
    return holder


def apart(*options: str, ask: str, **environment: str) -> Any:
    """Run a function of this module behind `unshare`; skip where the kernel forbids it."""
    unshare = ["unshare", "--kill-child", *options]
    try:
        tried = subprocess.run([*unshare, "true"], capture_output=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip(f"{DECLARED}no unshare here: apt-get install util-linux")
    if tried.returncode != 0:
        pytest.skip(f"{DECLARED}the kernel gives this user no namespaces")
    with spawn_by(unshare, f"{THERE}{ask}", PYTHONDEVMODE="", **environment) as process:
        return process.result(PATIENCE)


# What other processes do


def introduce(path: str) -> None:
    """Write down under which identity this process takes locks."""
    Path(path).write_text(json.dumps(current_holder().as_json()))
    print("there")


def stay(path: str) -> None:
    """Live until told."""
    introduce(path)
    input()


def stay_without_first_thread(path: str) -> None:
    """Go on in another thread than the first one, which ends."""
    introduce(path)
    threading.Thread(target=time.sleep, args=(100,)).start()
    ctypes.CDLL(None).pthread_exit(None)


def stay_under_another_name(path: str) -> None:
    """Live under a name that is hard to read: a part of a character, and parentheses."""
    # Of two bytes each: the kernel cuts the last one in half.
    Path("/proc/self/comm").write_bytes(b") S 1 (" + "\u0436".encode() * 7)
    stay(path)


def fork_unseen() -> dict[str, Any]:
    """Fork as uWSGI does, without telling Python; say who parent and child take themselves for."""
    reads, writes = os.pipe()
    parent = current_holder()
    # The system tells when a process started by its ticks.
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))
    child = ctypes.PyDLL(None).fork()
    if child == 0:
        os.write(writes, json.dumps(current_holder().as_json()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = json.loads(os.read(reads, 10000))
    return {"child": [said["pid"], child], "same": said["started_at"] == parent.started_at}


def who() -> Any:
    """Say who this process is."""
    return current_holder().as_json()


def look() -> Any:
    """Say who of those that the environment describes is gone."""
    holders = json.loads(os.environ["DISTLOCK_TEST_HOLDERS"])
    with override_settings(DISTLOCK_HOLDER=json.loads(os.environ.get("DISTLOCK_TEST_NAME", "{}"))):
        return [is_gone(Holder.from_json(each)) for each in holders]


def look_as_nobody() -> Any:
    """Do so as a user who may see nothing of others."""
    with override_settings(DISTLOCK_HOLDER={}):
        pass  # What that imports may lie where only root reads.
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return look()


def look_at_children() -> Any:
    """Say of a child that lives, and of one that has ended, whether it is gone."""
    seen = []
    for kill in (False, True):
        child = subprocess.Popen(["sleep", "100"])
        holder = replace(current_holder(), pid=child.pid)
        if kill:
            child.kill()
            child.wait()
        # What is known of its start is not what /proc says of this number.
        seen.append(is_gone(replace(holder, started_at=1.0)))
        child.kill()
        child.wait()
    return seen


def look_without_proc() -> Any:
    """Say who this process is and who is gone, where there is no /proc."""
    with override_settings(DISTLOCK_HOLDER=NAMED):
        ours = current_holder()
        child = subprocess.Popen(["sleep", "100"])
        holder = replace(ours, pid=child.pid)
        alive = [is_gone(ours), is_gone(holder)]
        child.kill()
        child.wait()
        dead = [is_gone(holder), is_gone(replace(holder, process="another"))]
    unnamed = replace(current_holder(), pid=child.pid)
    return {"known": [ours.boot_id, ours.started_at], "alive": alive, "dead": dead,
            "unnamed": is_gone(unnamed)}  # fmt: skip


# Here: the kernel is asked


def test_process_that_lives_is_not_gone_until_it_ends(tmp_path: Path) -> None:
    """A process is gone when it has ended, and not before; whoever asks is alive."""
    assert not is_gone(current_holder())
    assert not is_gone(replace(current_holder(), thread="another"))
    assert not is_gone(replace(current_holder(), started_at=None))
    with other_process(tmp_path / "holder") as (process, holder):
        assert holder.pid == process.popen.pid
        assert holder.started_at is not None
        assert holder.boot_id == current_holder().boot_id
        assert not is_gone(holder)
        process.send("end")
        process.result(PATIENCE)
        assert is_gone(holder)


def test_killed_process_is_gone_before_and_after_it_was_waited_for(tmp_path: Path) -> None:
    """A zombie holds nothing any more: whoever does not wait for its children hinders nobody."""
    with other_process(tmp_path / "holder", is_child=True) as (process, holder):
        process.popen.kill()
        assert eventually(lambda: is_gone(holder), timeout=10)
        os.kill(holder.pid, 0)
        assert is_gone(replace(holder, started_at=None))
        process.popen.wait()
        with pytest.raises(ProcessLookupError):
            os.kill(holder.pid, 0)
        assert is_gone(holder)
        assert is_gone(replace(holder, started_at=None))


def test_stopped_process_is_not_gone(tmp_path: Path) -> None:
    """It may go on at any moment, and believe that it holds its locks."""
    with other_process(tmp_path / "holder") as (process, holder):
        process.stop()
        assert eventually(lambda: state_of(holder.pid) == "T", timeout=10)
        assert not is_gone(holder)
        process.go_on()
        process.send("end")
        process.result(PATIENCE)


def test_process_whose_first_thread_ended_is_not_gone(tmp_path: Path) -> None:
    """The kernel calls it a zombie, and its other threads go on."""
    first_ends = other_process(tmp_path / "holder", "stay_without_first_thread", is_child=True)
    with first_ends as (process, holder):
        assert eventually(lambda: state_of(holder.pid) == "Z", timeout=10)
        assert not is_gone(holder)
        process.popen.kill()
        assert eventually(lambda: is_gone(holder), timeout=10)


def test_number_that_was_given_out_again(tmp_path: Path) -> None:
    """Another start time is another process; an unknown one could be the same."""
    with other_process(tmp_path / "holder") as (_process, holder):
        assert holder.started_at is not None
        assert is_gone(replace(holder, started_at=holder.started_at - 0.01))
        assert is_gone(replace(holder, started_at=holder.started_at + 3600))
        assert not is_gone(replace(holder, started_at=holder.started_at + 1e-9))
        assert not is_gone(replace(holder, started_at=float("nan")))
        assert not is_gone(replace(holder, started_at=None))


def test_number_of_a_thread_is_no_process() -> None:
    """The kernel answers for the number of a thread as well, with another start."""
    started, ended = threading.Event(), threading.Event()
    numbers: list[int] = []

    def run() -> None:
        numbers.append(threading.get_native_id())
        started.set()
        ended.wait(60)

    time.sleep(0.05)  # At another tick than the process.
    thread = threading.Thread(target=run)
    thread.start()
    started.wait(60)
    assert is_gone(replace(current_holder(), pid=numbers[0]))
    ended.set()
    thread.join()


def test_name_of_a_process_does_not_matter(tmp_path: Path) -> None:
    """What a process calls itself can neither hide it nor make it look dead."""
    with other_process(tmp_path / "holder", "stay_under_another_name") as (process, holder):
        assert holder.started_at is not None
        assert not is_gone(holder)
        assert is_gone(replace(holder, started_at=holder.started_at - 1))
        process.popen.kill()
        assert eventually(lambda: is_gone(holder), timeout=10)


def test_number_that_is_none_is_unknown() -> None:
    """A record that somebody else wrote costs no error, and no lock; empty ones prove nothing."""
    pid: Any
    for pid in (0, -1, 2**31, 2**63, "7", None, 1.5):
        assert not is_gone(replace(current_holder(), pid=pid))
        with override_settings(DISTLOCK_HOLDER=NAMED):
            assert not is_gone(replace(current_holder(), pid=pid, boot_id="another/1"))
    assert not is_gone(Holder())
    assert not is_gone(Holder(host=current_holder().host))


def test_fork_that_python_does_not_know_of_has_an_identity_of_its_own() -> None:
    """A worker of uWSGI does not take locks in the name of its master."""
    with spawn(f"{THERE}fork_unseen") as process:
        said = process.result(PATIENCE)
    assert said["child"][0] == said["child"][1]
    assert said["same"] is False


# Elsewhere: nothing can be seen


def test_process_of_another_machine_is_not_gone(gone: Holder) -> None:
    """That its number is free here says nothing; two machines may have one name."""
    assert is_gone(gone)
    for host in ("another", ""):
        assert not is_gone(replace(gone, host=host))
    for boot_id in ("another/4026531836", ""):
        assert not is_gone(replace(gone, boot_id=boot_id))
    # The prefix is a part of the host's name.
    with override_settings(DISTLOCK_HOLDER={"prefix": "eu-"}):
        assert not is_gone(gone)
        assert is_gone(replace(gone, host=f"eu-{gone.host}"))


def test_container_of_the_same_machine_counts_for_itself(gone: Holder) -> None:
    """Host and kernel may be shared: a number in another PID namespace means another process."""
    there = Holder.from_json(apart("--fork", "--pid", "--mount-proc", ask="who"))
    ours = current_holder()
    assert there.host == ours.host
    assert there.boot_id.partition("/")[0] == ours.boot_id.partition("/")[0]
    assert there.boot_id != ours.boot_id
    # It has ended; nobody here could know.
    assert not is_gone(there)
    assert not is_gone(replace(there, pid=gone.pid))
    # The other way round.
    assert gone_in("--fork", "--pid", "--mount-proc", of=[ours, gone]) == [False, False]


def test_proc_of_another_namespace_says_nothing_of_ours() -> None:
    """A container with the host's /proc sees other processes under the numbers of its own."""
    assert apart("--fork", "--pid", ask="look_at_children") == [False, True]


def test_clock_of_another_namespace_is_not_compared(tmp_path: Path) -> None:
    """Where the time since the boot is another one, the same process seems to start at another."""
    shifted = ("--fork", "--time", "--boottime", "1000")
    assert apart(*shifted, ask="who")["started_at"] is None
    with other_process(tmp_path / "holder") as (_process, holder):
        assert gone_in(*shifted, of=[holder]) == [False]


@pytest.mark.skipif(os.getuid() != 0, reason=f"{DECLARED}only root becomes another user")
@pytest.mark.parametrize("hidepid", ["off", "noaccess", "invisible"])
def test_process_of_another_user_is_not_gone(hidepid: str, tmp_path: Path, gone: Holder) -> None:
    """One that may not be asked, or that /proc hides, is there; one that ended is not."""
    mounted = tmp_path / "mount"
    mounted.write_text(
        f'#!/bin/sh\nmount -t proc -o hidepid={hidepid} proc /proc || exit 1\nexec "$@"\n'
    )
    mounted.chmod(0o755)
    with other_process(tmp_path / "holder") as (_process, holder):
        of = [holder, replace(holder, started_at=1.0), gone]
        seen = gone_in("--mount", str(mounted), of=of, ask="look_as_nobody")
    # Who sees when a process started knows that it is another one.
    assert seen == [False, hidepid == "off", True]


def test_without_proc_nothing_is_proven_but_by_name(tmp_path: Path) -> None:
    """As on macOS: a namesake is succeeded, unless its number shows that it may be alive."""
    hidden = tmp_path / "hide"
    hidden.write_text('#!/bin/sh\nmount -t tmpfs none /proc || exit 1\nexec "$@"\n')
    hidden.chmod(0o755)
    assert apart("--mount", str(hidden), ask="look_without_proc") == {
        "known": ["", None],
        "alive": [False, False],
        "dead": [True, False],
        "unnamed": False,
    }


# By name


def test_successor_of_a_named_process(gone: Holder) -> None:
    """Whoever has the name now is the one that was restarted, in another container or boot."""
    there = replace(gone, process="beat", boot_id="another/4026531836")
    with override_settings(DISTLOCK_HOLDER=NAMED):
        assert is_gone(there)
        assert is_gone(replace(there, pid=os.getpid()))
        assert is_gone(replace(there, boot_id=current_holder().boot_id + "1"))
        assert not is_gone(replace(there, process="worker"))
        assert not is_gone(replace(there, host="another"))


def test_name_that_nobody_gave_is_no_promise(gone: Holder) -> None:
    """The automatic name is that of the program, which many processes run."""
    there = replace(gone, process=current_holder().process, boot_id="another/4026531836")
    assert not is_gone(there)
    for setting in ({"process": None}, {"process": ""}):
        with override_settings(DISTLOCK_HOLDER=setting):
            assert not is_gone(there)
    # The same name, once it is given.
    with override_settings(DISTLOCK_HOLDER={"process": there.process}):
        assert is_gone(there)


def test_namesakes_that_live_do_not_steal_from_each_other(tmp_path: Path) -> None:
    """Workers that all got one name: where the kernel sees the other one, it decides."""
    with (
        override_settings(DISTLOCK_HOLDER=NAMED),
        other_process(tmp_path / "holder", is_child=True) as (process, holder),
    ):
        sibling = replace(holder, process="beat")
        assert not is_gone(current_holder())
        assert not is_gone(sibling)
        assert not is_gone(replace(sibling, started_at=None))
        # Where its start is unknown, it may be this one.
        assert not is_gone(replace(sibling, boot_id=""))
        process.popen.kill()
        assert eventually(lambda: is_gone(sibling), timeout=10)
        process.popen.wait()
        assert is_gone(replace(sibling, boot_id=""))


def test_machine_without_a_name_has_no_named_processes(
    gone: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every machine that nobody named is called so; a prefix tells them apart."""
    for name in ("localhost", "localhost.localdomain", ""):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        there = replace(gone, process="beat", host=name, boot_id="another/4026531836")
        with override_settings(DISTLOCK_HOLDER=NAMED):
            assert not is_gone(there)
        with override_settings(DISTLOCK_HOLDER={**NAMED, "prefix": "eu-"}):
            assert is_gone(replace(there, host=f"eu-{name}"))


# Words for the above


def state_of(pid: int) -> str:
    """Return the letter that the kernel has for what a process does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def gone_in(*options: str, of: list[Holder], ask: str = "look") -> Any:
    """Ask a process behind `unshare` who is gone."""
    described = json.dumps([each.as_json() for each in of])
    return apart(*options, ask=ask, DISTLOCK_TEST_HOLDERS=described)
