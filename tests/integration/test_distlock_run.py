"""`manage.py distlock_run`: any program under a lock, with real programs and real signals."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError, ManagementUtility, call_command
from django.test import override_settings

from django_distlock import distlock, lock_backends
from django_distlock.locks.lease import Lease
from django_distlock.management import leash
from django_distlock.management.programs import Program, Signals, find
from django_distlock.models import FenceCounter
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import held

from .databases import here
from .operating import DEAD
from .projects import ROOT, Project, run_python
from .runs import Run, children_of, end, eventually, state_of

#: A shell's loop, because a shell looks at signals between its commands.
FOREVER = "echo started $$; while :; do sleep 0.05; done"
#: A program that a shell has started, and that says so when it minds signals.
CHILD = "sh -c 'echo child $$; exec sleep 60' & "


@pytest.fixture
def project() -> Project:
    """Give a project with the locks of this process's `default`, on PostgreSQL."""
    return Project("default")


def shell(script: str) -> list[str]:
    """Return a program that runs a shell's script."""
    return ["--", "sh", "-c", script]


def is_free(key: str) -> bool:
    """Whether the next one is granted the key at once."""
    lease = distlock(key, wait=0).try_acquire()
    return lease is not None and lease.release()


def refused(*arguments: str) -> CommandError:
    """Run the command here; return the error that it ends with."""
    with pytest.raises(CommandError) as caught:
        call_command("distlock_run", *arguments, stderr=StringIO())
    return caught.value


def status_here(*arguments: str) -> object:
    """Run the command here, as `manage.py` does; return its status."""
    try:
        ManagementUtility(["manage.py", "distlock_run", *arguments]).execute()
    except SystemExit as ended:
        return ended.code
    return 0


# What the program sees, and how it ends


def test_program_has_the_lock_and_the_streams(project: Project, key: str) -> None:
    """It reads our input, writes our output, knows key and fence, and the lock is held.

    What is ignored where we begin, as under `nohup`, ends neither of us.
    """
    script = "echo key=$DISTLOCK_KEY; echo fence=$DISTLOCK_FENCE >&2; read line; echo read $line"
    with Run(project, key, *shell(f"{script}; exit 4"), ignored=signal.SIGHUP) as run:
        fence = run.says("fence=")
        assert run.says("key=") == key
        record = held(lock_backends["default"], key)
        assert (str(record.fence), record.holder.pid) == (fence, run.popen.pid)
        assert record.holder.metadata == {"program": "sh"}
        run.signal(signal.SIGHUP)
        run.types("what was typed\n")
        assert run.says("read ") == "what was typed"
        assert run.status() == 4
    assert is_free(key)


def test_ends_as_the_program_did(key: str) -> None:
    """With its status, or 128 and the number of the signal that has ended it."""
    for script, status in (("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)):
        assert status_here(key, *shell(script)) == status
        assert is_free(key)


def test_package_may_be_in_a_zip(project: Project, key: str, tmp_path: Path) -> None:
    """As in a zipapp: what runs beside the program is no file there."""
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", ROOT, "django_distlock")
    environment = {**project._environment(), "PYTHONPATH": f"{packed}:{ROOT}"}
    command = ("-m", "django", "distlock_run", key, *shell("echo fence=$DISTLOCK_FENCE; exit 3"))
    assert run_python(tmp_path, *command, status=3, **environment) == "fence=1\n"
    assert is_free(key)


def test_status_is_told_though_nobody_hears_the_error(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard error was closed, its disk is full, or its reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    with (
        os.fdopen(writer, "w", buffering=1) as nobody,
        Path("/dev/full").open("w", buffering=1) as full,
    ):
        for stream in (None, nobody, full):
            monkeypatch.setattr(sys, "stderr", stream)
            assert status_here(key, "--", "no-such-program") == 127


def test_program_takes_all_that_stands_behind_the_dashes(
    key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Options of ours and dashes are the program's there, and no shell reads any of it.

    What was opened for it, as with `3>file`, it has.
    """
    words = ["--wait", "1", "--", "--help", "$HOME", "a b", "*"]
    assert status_here(key, "--", "printf", "<%s>\\n", *words) == 0
    assert capfd.readouterr().out.split("\n") == [*(f"<{word}>" for word in words), ""]
    with (tmp_path / "opened").open("w") as opened:
        os.set_inheritable(opened.fileno(), True)
        write = f"import os; os.write({opened.fileno()}, b'here\\n')"
        assert status_here(key, "--", sys.executable, "-c", write) == 0
    assert (tmp_path / "opened").read_text() == "here\n"


def test_code_may_give_a_timedelta(key: str) -> None:
    """As for every duration; a program that ends with 0 raises nothing."""
    second = timedelta(seconds=1)
    call_command("distlock_run", key, "--", "true", wait=second, ttl=second, grace=second)
    assert is_free(key)


def test_code_is_bound_by_the_rules_of_the_command_line(key: str) -> None:
    """Before the program begins."""
    for name, value in (("grace", -1), ("grace", "long"), ("on_lost", "kill")):
        with pytest.raises(CommandError, match=f"argument --{name.replace('_', '-')}"):
            call_command("distlock_run", key, "--", "false", **{name: value})
    call_command("distlock_run", key, "--", "true", ttl="5", wait="none", permits="2")


def test_held_key_stays_taken_behind_the_program(key: str) -> None:
    """With `--hold` the next run of the window ends with 75, though the first has ended."""
    assert status_here(key, "--hold", "--ttl", "60", *shell("exit 0")) == 0
    error = refused(key, "--wait", "0", *shell("exit 1"))
    assert error.returncode == 75
    told = (
        rf"The key '{key}' was not granted at once: .* has finished, and the key stays held for"
        r" .* s\.$"
    )
    assert re.match(told, str(error))
    lock_backends["default"].force_release(key)


def test_as_many_run_as_there_are_permits(key: str) -> None:
    """With `--permits`, one beside another; and no more than that."""
    here("postgres")
    one = distlock(key, backend="postgres", ttl=60, permits=2).acquire()
    arguments = (key, "--wait", "0", "--permits", "2", "--backend", "postgres")
    assert status_here(*arguments, *shell("exit 0")) == 0
    another = distlock(key, backend="postgres", ttl=60, permits=2).acquire()
    assert refused(*arguments, *shell("exit 0")).returncode == 75
    one.release()
    another.release()


# What is refused


@pytest.mark.parametrize("backend", ["postgres", "redis"])
def test_busy_is_75_and_names_the_holder(key: str, backend: str, tmp_path: Path) -> None:
    """Who has it, since when, and nothing is run, until the key is free."""
    ran = tmp_path / "ran"
    touch = ("--backend", backend, "--", "touch", str(ran))
    lease = distlock(key, backend=backend, metadata={"program": "deploy.sh"}).acquire()
    try:
        error = refused(key, "--wait", "0", *touch)
    finally:
        lease.release()
    assert error.returncode == 75
    pattern = (
        rf"'{key}' was not granted at once: .* \(pid {os.getpid()}\) on \S+ has held it for"
        r" \d\.\d s \(since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\), and runs 'deploy\.sh'\.$"
    )
    assert re.search(pattern, str(error))
    assert not ran.exists()
    call_command("distlock_run", key, *touch)
    assert ran.exists()
    with distlock(key, backend=backend, wait=0) as after:
        assert after.fence > lease.fence + 1


@pytest.mark.parametrize("end", ["release", "TERM", "INT"])
def test_waits_for_its_turn(project: Project, key: str, end: str) -> None:
    """It runs the program when the holder gives the key back, unless it is told to end before."""
    lease = distlock(key).acquire()
    with Run(project, key, "--wait", "none", *shell("echo ran")) as run:
        eventually(lambda: bool(lock_backends["default"].waiters.of(key)), "somebody waits")
        assert run.said == ""
        if end == "release":
            lease.release()
        else:
            run.signal(signum := getattr(signal, f"SIG{end}"))
        assert run.status() == (0 if end == "release" else 128 + signum)
        assert run.said == ("ran\n" if end == "release" else "")
    if end != "release":
        lease.release()
    assert is_free(key)


def test_program_that_cannot_be_run(
    key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """127: there is none; 126: it cannot be run. The key was never taken; 2: it is none.

    What only the system finds out, it finds under the lock, which is given back.
    """

    def file(name: str, text: str, mode: int = 0o755) -> str:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
        return str(tmp_path / name)

    for name, status in (
        ("no-such-program", 127),
        (str(tmp_path / "nothing"), 127),
        ("", 127),
        (file("plain", "#!/bin/sh\n", 0o644), 126),
        (str(tmp_path), 126),
    ):
        error = refused(key, "--", name)
        assert (error.returncode, repr(name) in str(error)) == (status, True)
    assert not FenceCounter.objects.filter(key=key).exists()
    assert refused("", "--", "true").returncode == 2
    assert refused(key, "--", file("lost", "#!/no/such/interpreter\n")).returncode == 127
    assert refused(key, "--", file("none", "no format\n")).returncode == 126
    assert refused(key, "--", "true", "x" * 4_000_000).returncode == 126
    assert capfd.readouterr().err == ""  # Nobody was killed.
    assert is_free(key)


def test_store_that_does_not_answer_is_69(key: str) -> None:
    """It is asked until `--wait` is over, for its tables already; the word is for programs."""
    with override_settings(DISTLOCK={"default": DEAD}):
        error = refused(key, "--wait", "0.2", "--", "true")
    assert error.returncode == 69
    assert re.search(r"127\.0\.0\.1:1.* \(service_unavailable\)$", str(error), re.DOTALL)
    with alias_like("default", HOST="127.0.0.1", PORT="1") as using, locks_on(using) as backend:
        error = refused(key, "--wait", "0.2", "--backend", backend, "--", "true")
    assert error.returncode == 69
    assert str(error).startswith(f"The lock store '{using}' did not answer: ")
    assert str(error).endswith(" (service_unavailable)")


def test_wrong_arguments_are_2(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A slip is an error that names the value and the rule."""
    for arguments, rule in (
        ("true", 'write "--" and the program'),
        ("--", 'write "--" and the program'),
        ("another -- true", "unrecognized arguments: another"),
        ("--ttl 0 -- true", "at least 0.1"),
        ("--ttl soon -- true", "'soon'"),
        ("--ttl 1e7 -- true", "at most 604800"),
        ("--wait -1 -- true", "wait"),
        ("--wait long -- true", "'long' is not a number"),
        ("--permits 0 -- true", "from 1 to 10,000"),
        ("--permits many -- true", "'many'"),
        ("--grace -1 -- true", "grace"),
        ("--on-lost kill -- true", "invalid choice"),
        ("--backend nowhere -- true", "'nowhere' is not configured"),
        ("--backend memory -- true", "in process memory"),
    ):
        assert status_here(key, *arguments.split()) == 2, arguments
        assert rule in capsys.readouterr().err


# Signals


def test_signals_reach_the_program_and_its_children(project: Project, key: str) -> None:
    """Each is passed on; the lock is held until the program ends, and free then.

    A program that minds no signal is told again and again.
    """
    traps = "".join(
        f"trap 'echo got {name}' {name}; " for name in ("HUP", "INT", "QUIT", "USR1", "TERM")
    )
    script = f"{traps} trap 'exit 3' USR2; {CHILD} {FOREVER}"
    with Run(project, key, *shell(script)) as run:
        sleeper = int(run.says("child "))
        run.says("started")
        for times in (1, 2):
            for name in ("HUP", "INT", "QUIT", "USR1", "TERM"):
                run.signal(getattr(signal, f"SIG{name}"))
                run.says(f"got {name}", times=times)
                assert run.said.count(f"got {name}") == times
        assert not is_free(key)
        eventually(lambda: not state_of(sleeper), "they have ended the child")
        run.signal(signal.SIGUSR2)
        assert run.status() == 3
    assert is_free(key)


def test_stopped_program_keeps_its_lock(project: Project, key: str) -> None:
    """Without a terminal TSTP stops the program alone, and we go on renewing; CONT continues it."""
    # One process: a shell that is stopped while it starts another one is in no state to tell.
    with Run(project, key, "--ttl", "3", *shell("echo started $$; exec sleep 60")) as run:
        program = int(run.says("started "))
        run.signal(signal.SIGTSTP)
        eventually(lambda: state_of(program) == "T", "it is stopped")
        renewed = _expires(key)
        eventually(lambda: _expires(key) > renewed, "the lock is renewed")
        assert state_of(program) == "T"
        run.signal(signal.SIGCONT)
        eventually(lambda: state_of(program) in ("R", "S"), "it goes on")
        run.signal(signal.SIGTERM)
        assert run.status() == 143


def _expires(key: str) -> datetime:
    record = held(lock_backends["default"], key)
    assert record.expires_at is not None
    return record.expires_at


# At a terminal


def test_what_is_typed_reaches_the_program_once(project: Project, key: str) -> None:
    """Ctrl-C comes to it from the terminal; what somebody else sends us is passed on.

    Ctrl-Z stops both, so that a shell takes its terminal back; with `fg` both go on.
    """
    traps = "trap 'echo got INT' INT; trap 'echo got USR1' USR1; trap '' TSTP; trap 'exit 3' TERM"
    command = ("--ttl", "60", *shell(f"{traps}; {FOREVER}"))
    with Run(project, key, *command, terminal=True) as run:
        program = int(run.says("started "))
        for times in (1, 2):
            run.types("\x03")
            run.says("got INT", times=times)
            # By then a second one would have come.
            run.signal(signal.SIGUSR1)
            run.says("got USR1", times=times)
            assert run.said.count("got INT") == times
        run.types("\x1a")
        eventually(lambda: state_of(run.popen.pid) == "T", "we are stopped")
        # Also one that wants to hear nothing of it: nobody renews its lock now.
        eventually(lambda: state_of(program) == "T", "the program is stopped")
        os.killpg(run.popen.pid, signal.SIGCONT)
        eventually(lambda: state_of(program) in ("R", "S"), "it goes on")
        run.signal(signal.SIGTERM)
        assert run.status() == 3
    assert is_free(key)


def test_first_process_of_a_container_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z cannot stop it: it would renew for ever the lock of a program that stands still."""
    sent: list[int] = []
    program: Any = SimpleNamespace(send=sent.append, shares_foreground=lambda: True)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "kill", lambda _pid, signum: sent.append(signum))
    signals = Signals()
    signals.pass_on(program, lambda: None)
    signals._handle(signal.SIGTSTP, None)
    assert sent == []


def test_suspended_for_too_long_is_lost(project: Project, key: str) -> None:
    """When the lock has ended meanwhile, the program is ended when it goes on."""
    with Run(project, key, "--ttl", "2", *shell(FOREVER), terminal=True) as run:
        program = int(run.says("started "))
        run.types("\x1a")
        eventually(lambda: state_of(run.popen.pid) == "T", "we are stopped")
        eventually(lambda: is_free(key), "the lock has ended")
        os.killpg(run.popen.pid, signal.SIGCONT)
        assert run.status() == 76
        assert state_of(program) == ""


# Losing the lock


def test_end_of_a_program_is_seen_while_another_thread_asks() -> None:
    """As the callback of a loss does: who waits for the program would wait for ever."""
    program = Program(["sh", "-c", "exit 3"], find("sh"), os.environ)
    program.let_go()
    eventually(lambda: not state_of(abs(program.address)), "it has ended")
    with program._process._waitpid_lock:  # type: ignore[attr-defined]
        assert not program.is_running
    assert program.wait() == 3
    assert not program.is_running


def test_number_of_a_program_is_its_own_until_its_end_is_waited_for() -> None:
    """Who asks whether it runs leaves its end to who waits: no signal meets a stranger."""
    program = Program(["sh", "-c", "exit 3"], find("sh"), os.environ)
    program.let_go()
    eventually(lambda: not program.is_running, "it has ended")
    os.kill(abs(program.address), 0)
    assert program.wait() == 3
    with pytest.raises(ProcessLookupError):
        os.kill(abs(program.address), 0)


def test_lost_lock_ends_the_program(project: Project, key: str) -> None:
    """It gets TERM, after `--grace` seconds KILL, and with it what it has started.

    The status is 76, whatever it says.
    """
    stubborn = "sh -c 'trap \"\" TERM; echo child $$; while :; do sleep 0.05; done' & "
    script = f"{stubborn} trap 'echo told; exit 0' TERM; {FOREVER}"
    with Run(project, key, "--ttl", "3", "--grace", "2", *shell(script)) as run:
        child, program = int(run.says("child ")), int(run.says("started "))
        assert child != program
        assert lock_backends["default"].force_release(key)
        run.says("told")
        assert run.status() == 76
        assert f"The lock on '{key}' was lost: its program was stopped." in run.said
    assert state_of(child) == ""


def test_loss_that_we_see_first_waits_for_no_grace(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for the program sees its end, also if no callback has come before."""
    monkeypatch.setattr(Lease, "on_lost", lambda *_: lock_backends["default"].force_release(key))
    began = time.monotonic()
    assert status_here(key, "--ttl", "1", "--grace", "20", "--", "sleep", "60") == 76
    assert time.monotonic() - began < 10


def test_loss_before_the_end_is_told_behind_it(project: Project, key: str) -> None:
    """A program that ends before anybody sees the loss has worked without the lock: 76."""
    with Run(project, key, *shell("echo started; read line")) as run:
        run.says("started")
        assert lock_backends["default"].force_release(key)
        run.types("\n")
        assert run.status() == 76
        assert f"The lock on '{key}' was lost; its program has ended." in run.said


# Killed


def test_program_does_not_survive_us(project: Project, key: str) -> None:
    """When we are killed, the program and its children end, long before the key is free."""
    traps = "trap 'echo got USR1' USR1; trap '' TERM"
    command = shell(f"trap '' USR1; {CHILD} {traps}; {FOREVER}")
    with Run(project, key, "--grace", "0.3", *command) as run:
        child, program = int(run.says("child ")), int(run.says("started "))
        # Passed on when it is watched over, and not before.
        run.signal(signal.SIGUSR1)
        run.says("got USR1")
        run.signal(signal.SIGKILL)
        eventually(lambda: state_of(program) == state_of(child) == "", "both are gone")
        assert not is_free(key)
        assert run.status() == -signal.SIGKILL
    lock_backends["default"].force_release(key)


def test_program_does_not_begin_before_it_is_watched(tmp_path: Path) -> None:
    """When we are killed between the two, nobody would end it."""
    file = tmp_path / "begun"
    script = (
        "import os, signal, sys\n"
        "from django_distlock.management.programs import Program, find\n"
        f"print(abs(Program(['touch', {str(file)!r}], find('touch'), os.environ).address))\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False)
    assert killed.returncode == -signal.SIGKILL
    program = int(killed.stdout)
    eventually(lambda: state_of(program) == "", "the program is gone")
    assert not file.exists()


def test_gate_becomes_the_program_at_a_word(tmp_path: Path) -> None:
    """When its pipe ends before that, nobody watches, and it ends without the program."""
    file = tmp_path / "begun"
    # It reads from the descriptor 0, and would tell an error to 2.
    gate = [sys.executable, "-I", "-S", *leash.script("gate.py"), "0", "2", "1"]
    for word in (b"", b"!"):
        assert not file.exists()
        ended = subprocess.run([*gate, find("touch"), "touch", str(file)], input=word, check=True)
        assert ended.stderr is None
    assert file.exists()


def test_signal_reaches_a_program_that_has_not_begun(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept until then, Ctrl-Z would stop what waits to be let go, and not us: we would hang."""
    file, let_go = tmp_path / "begun", Program.let_go

    def signalled(program: Program) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: not state_of(abs(program.address)), "it has ended")
        let_go(program)

    monkeypatch.setattr(Program, "let_go", signalled)
    assert status_here(key, "--", "touch", str(file)) == 128 + signal.SIGTERM
    assert not file.exists()
    assert is_free(key)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "lost"])
def test_program_ends_where_nobody_reads(project: Project, key: str, is_killed: bool) -> None:
    """Also if what read our output, as `tee` does, was killed before or together with us."""
    with Run(project, key, "--ttl", "3", "--grace", "0.3", *shell(FOREVER)) as run:
        program = int(run.says("started "))
        try:
            run.close()
            if is_killed:
                run.signal(signal.SIGKILL)
            else:
                assert lock_backends["default"].force_release(key)
            eventually(lambda: state_of(program) == "", "the program is gone")
            assert run.popen.wait(20) == (-signal.SIGKILL if is_killed else 76)
        finally:
            end(program)
    lock_backends["default"].force_release(key)


def test_program_ends_where_a_full_pipe_is_not_read(project: Project, key: str) -> None:
    """The log of the lost lease waits for its reader then, and the program does not."""
    fill = "head -c 1000000 /dev/zero >&2 &"
    command = shell(f"echo started $$; {fill} while :; do sleep 0.05; done")
    with Run(project, key, "--ttl", "3", "--grace", "0.3", *command) as run:
        program = int(run.says("started "))
        try:
            eventually(lambda: bool(children_of(program)), "it writes")
            assert lock_backends["default"].force_release(key)
            eventually(lambda: state_of(program) == "", "the program is gone")
        finally:
            end(program)
    lock_backends["default"].force_release(key)


def test_program_may_go_on_without_its_lock(project: Project, key: str) -> None:
    """With `--on-lost=ignore` that is said, and nobody ends it, also when we are killed."""
    with Run(project, key, "--ttl", "3", "--on-lost=ignore", *shell(FOREVER)) as run:
        program = int(run.says("started "))
        try:
            assert lock_backends["default"].force_release(key)
            run.says(f"The lock on '{key}' is lost: its program continues without it.")
            others = children_of(run.popen.pid) - {program}
            assert others
            run.signal(signal.SIGKILL)
            eventually(lambda: not any(map(state_of, others)), "who would end it is gone")
            assert state_of(program) in ("R", "S", "D")
        finally:
            end(program)
