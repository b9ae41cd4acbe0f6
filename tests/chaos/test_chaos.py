"""The drill finds what must never be, and nothing else."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.contract.locking import eventually

from .crew import ROOT, BadWire
from .faults import LOST
from .history import EXCUSED, Findings, Line, examined, saved_rows
from .summary import _SHOWN_BY, FAULTS, OPERATIONS, hollow, summary


def grant(lease: int, at: float, fence: int, until: float, **more: Any) -> Line:
    """Describe a grant, each to another process."""
    facts = {"form": "block", "key": "key", "token": f"{lease}", "asked": at}
    return {"event": "grant", "t": at, "who": f"{lease}", "lease": lease, "fence": fence,
            "until": until, **facts, **more}  # fmt: skip


def line(lease: int, event: str, at: float, **more: Any) -> Line:
    """Describe what became of it."""
    return {"event": event, "t": at, "who": f"{lease}", "lease": lease, **more}


def broken(*lines: Line) -> list[str]:
    """Return what is found, in a history in any order."""
    return sorted(examined(sorted(lines, key=lambda each: float(each["t"]))).broken)


def test_overlap_is_found() -> None:
    """Two hold a key at one moment, each before its own deadline."""
    first = [grant(1, 10, 1, 12), line(1, "check", 11.5, until=14), line(1, "end", 13)]
    assert broken(*first, grant(2, 12.9, 2, 16), line(2, "end", 15)) == ["overlap"]
    assert broken(*first, grant(2, 13, 2, 16), line(2, "end", 15)) == []


def test_holder_that_stood_still_has_no_overlap() -> None:
    """Behind its deadline it holds nothing, whenever it says so."""
    first = [grant(1, 10, 1, 12), line(1, "lost", 20, why="its deadline has passed")]
    assert broken(*first, grant(2, 12.1, 2, 16), line(2, "end", 15)) == []


def test_what_an_operator_took_is_told_apart() -> None:
    """The old holder may not know yet; without the operator, it is an overlap."""
    lines = [grant(1, 10, 1, 20), line(1, "end", 14)]
    lines += [grant(2, 12, 3, 20), line(2, "end", 13)]
    order = {"event": "operator", "t": 11, "who": "chaos", "form": "force_release", "key": "key"}
    found = examined(sorted([*lines, {**order, "before": 1, "after": 2}], key=lambda x: x["t"]))
    assert not found.broken
    assert found.counted["overlap with what an operator took"] == 1
    assert broken(*lines, {**order, "before": 1, "after": 1}) == ["overlap"]


def kept(at: float, until: float, **more: Any) -> Line:
    """Describe what kept the key from others without a lease."""
    facts = {"form": "transaction", "key": "key", "begin": at, "until": until, "permits": 0}
    return {"event": "kept", "t": until, "who": "kept", **facts, **more}


def test_more_holders_than_share_a_key_are_found() -> None:
    """So many may have it at once, or one alone."""

    def shared(lease: int, at: float, permits: int = 2) -> list[Line]:
        return [grant(lease, at, lease, at + 2, permits=permits), line(lease, "end", at + 1)]

    two = [*shared(1, 10), *shared(2, 10.5)]
    assert broken(*two, *shared(3, 11)) == []
    assert broken(*two, *shared(3, 10.9)) == ["overlap"]
    assert broken(*two, *shared(3, 11.2, permits=0)) == ["overlap"]
    # One of them was ended by an operator, who asked for all.
    order = {"event": "operator", "t": 10.8, "who": "chaos", "form": "force_release", "key": "key"}
    order |= {"before": 2, "after": 3, "result": "DONE", "seen": 2}
    three = [*two, *shared(4, 10.9)]
    assert broken(*three, order) == []
    assert broken(*three, *shared(5, 10.95), order) == ["overlap"]
    assert broken(*three, *shared(5, 10.95), {**order, "seen": None}) == []


def test_lease_beside_a_transaction_is_found() -> None:
    """That has locked the key, or guards the lease before; those who share it may be there."""
    lease = [grant(1, 10, 1, 12), line(1, "end", 11)]
    assert broken(*lease, kept(11, 13)) == []
    assert broken(*lease, kept(10.9, 13)) == ["overlap"]
    assert broken(kept(10, 11), kept(10.5, 11.5)) == ["overlap"]
    assert broken(kept(10, 11, permits=9), kept(10.5, 11.5, permits=9)) == []
    guard = kept(10.5, 14, form="guarded", fence=1, token="1", asked=10)
    assert broken(*lease, guard) == []
    beside = [*lease, guard, grant(2, 13.9, 3, 15), line(2, "end", 14)]
    assert broken(*beside) == ["overlap"]
    # No operator can have taken it meanwhile.
    order = {"event": "operator", "t": 10.2, "who": "chaos", "form": "force_release", "key": "key"}
    assert broken(*beside, {**order, "before": 1, "after": 2}) == ["overlap"]


def test_order_and_refusal_for_somebody_else_are_found() -> None:
    """Whom an operator did not mean goes on, and a row refuses nobody who holds the key."""
    order = {"event": "operator", "t": 11, "who": "chaos", "form": "force_release", "key": "key"}
    order |= {"before": 2, "after": 3, "result": "DONE", "seen": 2}
    assert broken(order) == []
    assert broken({**order, "seen": 1, "result": "NOTHING"}) == []
    assert broken({**order, "seen": 1}) == ["order for another holder"]
    refusal = {"event": "refused", "t": 10, "who": "1", "key": "key", "fence": 2, "held": False}
    assert broken(refusal) == []
    assert broken({**refusal, "held": True}) == ["refused holder"]
    assert broken({**refusal, "held": True}, order) == []
    assert broken({**refusal, "held": True}, loss(9, 9.1, 11)) == []


def test_repeated_and_falling_fences_are_found() -> None:
    """Each grant has a higher one than all that were granted before it was asked for."""
    first = [grant(1, 10, 5, 12), line(1, "end", 11)]
    assert broken(*first, grant(2, 12, 5, 14), line(2, "end", 13)) == ["repeated fence"]
    assert broken(*first, grant(2, 12, 4, 14), line(2, "end", 13)) == ["falling fence"]
    assert broken(*first, grant(2, 12, 4, 14, asked=9), line(2, "end", 13)) == []
    # A block that is entered again is no grant, also where an operator has taken the key meanwhile.
    again = grant(3, 13, 5, 14, form="reentered", token="1", asked=13)
    other = [grant(2, 12, 7, 14), line(2, "end", 12.5)]
    assert broken(*first, *other, again) == []


def test_lease_that_is_gone_before_its_deadline_is_found() -> None:
    """Unless it was given up because nobody answered."""
    first = grant(1, 10, 1, 14)
    assert broken(first, line(1, "lost", 13, why="the store no longer has it")) == ["gone early"]
    assert broken(first, line(1, "lost", 13, why="3 renewals in a row had no answer")) == []
    assert broken(first, line(1, "lost", 15, why="its deadline has passed")) == []
    # A block that entered it again has made it shorter.
    again = [
        grant(2, 11, 1, 14, form="reentered", token="1"),
        line(2, "extended", 11.5, until=12.5),
    ]
    assert broken(first, *again, line(1, "lost", 13, why="its deadline has passed")) == []
    # Who is told to end sooner learns it by his next renewal.
    order = {"event": "operator", "t": 11, "who": "chaos", "form": "expire_soon", "key": "key"}
    order |= {"before": 1, "after": 1}
    assert broken(first, order, line(1, "lost", 13, why="the store no longer has it")) == []


def loss(since: float, at: float, over: float) -> Line:
    """Describe that the store lost its data."""
    return {"event": "fault", "t": at, "who": "chaos", "form": "loss: flushed", "since": since,
            "over": over}  # fmt: skip


def test_overlap_behind_a_loss_of_data_is_excused() -> None:
    """From the loss on, until what was lost is over; nothing else is."""
    lines = [grant(1, 10, 1, 12), line(1, "end", 12)]
    lines += [grant(2, 11, 2, 13), line(2, "end", 13)]
    found = examined(sorted([*lines, loss(10.5, 10.6, 13)], key=lambda each: float(each["t"])))
    assert not found.broken
    assert found.counted[EXCUSED] == 1
    assert broken(*lines) == ["overlap"]
    # It lasts for longer than what was lost could.
    assert broken(*lines, loss(10.5, 10.6, 11.9)) == ["overlap"]
    # There were two before the data were lost.
    assert broken(*lines, loss(11.1, 11.2, 14)) == ["overlap"]
    # Both were asked for behind the loss.
    assert broken(*lines, loss(9.8, 9.9, 14)) == ["overlap"]


def test_excuse_covers_no_later_stretch_of_the_same_two() -> None:
    """A holder that still claims what was lost when its time is over has no excuse."""
    lines = [grant(1, 10, 1, 12), line(1, "check", 11.5, until=15), line(1, "end", 14)]
    lines += [grant(2, 11, 2, 15), line(2, "check", 11.2, until=15), line(2, "end", 14)]
    assert broken(*lines, loss(10.5, 10.6, 14)) == []
    assert broken(*lines, loss(10.5, 10.6, 13)) == ["overlap"]


def test_block_entered_again_behind_a_loss_has_the_grant_from_before() -> None:
    """Its grant is what was lost, however late the block was entered."""
    lines = [grant(1, 10, 1, 12), line(1, "end", 12)]
    lines += [grant(3, 10.8, 1, 12, form="reentered", token="1"), line(3, "end", 12)]
    lines += [grant(2, 11, 2, 13), line(2, "end", 13)]
    assert broken(*lines, loss(10.5, 10.6, 13)) == []


def test_loss_of_data_excuses_no_fence() -> None:
    """They rise over it."""
    first = [grant(1, 10, 5, 12), line(1, "end", 11)]
    second = [grant(2, 12, 4, 14), line(2, "end", 13)]
    assert broken(*first, *second, loss(11.5, 11.6, 14)) == ["falling fence"]


def test_lease_that_went_with_the_data_is_told_apart() -> None:
    """It is gone before its deadline by the loss; one that was granted behind it is not."""
    lines = [grant(1, 10, 1, 14), line(1, "lost", 13, why="the store no longer has it")]
    assert broken(*lines, loss(12, 12.1, 14.5)) == []
    assert broken(*lines, loss(12, 12.1, 12.9)) == ["gone early"]
    assert broken(*lines, loss(9, 9.1, 14.5)) == ["gone early"]


def test_stale_write_is_found() -> None:
    """A row takes no lower fence than that of a write which had ended before."""

    def wrote(at: float, fence: int, asked: float) -> Line:
        return {"event": "wrote", "t": at, "who": "1", "key": "key", "fence": fence, "asked": asked}

    assert broken(wrote(1, 5, 0.9), wrote(3, 4, 2)) == ["stale write"]
    # At once, either may have been first.
    assert broken(wrote(1, 5, 0.9), wrote(3, 4, 0.95)) == []
    assert broken(wrote(1, 5, 0.9), wrote(3, 5, 2)) == []
    assert broken(wrote(1, 5, 0.9), {**wrote(3, 4, 2), "key": "other"}) == []
    # A restored row has forgotten the first; a lost lock has not.
    assert broken(wrote(1, 5, 0.9), {**loss(1.5, 1.6, 2), "kept": 0.5}, wrote(3, 4, 2)) == []
    assert broken(wrote(1, 5, 0.9), loss(1.5, 1.6, 2), wrote(3, 4, 2)) == ["stale write"]


def test_saved_rows_must_be_there() -> None:
    """Unless a backup was restored that was made before them."""

    def saved(asked: float, at: float) -> Line:
        return {"event": "saved", "t": at, "who": "1", "row": f"{at}", "asked": asked}

    lines = [saved(0, 1), saved(1.5, 3), saved(4.5, 6), saved(5.5, 7)]
    assert saved_rows([*lines, loss(4, 5, 9)]) == ["1", "3", "6", "7"]
    assert saved_rows([*lines, {**loss(4, 5, 9), "kept": 2}]) == ["1", "7"]


def test_expiries_are_counted() -> None:
    """A deadline that passed under a holder, or a process that was killed."""
    late = [grant(1, 10, 1, 12), line(1, "lost", 13, why="its deadline has passed")]
    assert examined(late).counted["expired"] == 1
    assert examined([grant(1, 10, 1, 12)]).counted["expired"] == 1
    assert examined([grant(1, 10, 1, 12), line(1, "end", 11)]).counted["expired"] == 0


#: Where everything happened once.
ALL_ONCE = Counter(
    dict.fromkeys([*OPERATIONS.values(), *(shown[0] for shown in _SHOWN_BY.values())], 1)
)


def test_every_fault_is_counted() -> None:
    """A fault that nothing shows would never be missed."""
    assert FAULTS.keys() == _SHOWN_BY.keys()
    assert hollow(ALL_ONCE, FAULTS, rows=True) == []
    assert hollow(ALL_ONCE, FAULTS, rows=True, least=2)[: len(FAULTS)] == list(FAULTS)


def test_run_without_a_chosen_fault_proves_nothing() -> None:
    """And is not missed where it was not chosen."""
    for name in FAULTS:
        without = ALL_ONCE - Counter(dict.fromkeys(_SHOWN_BY[name], 1))
        assert hollow(without, FAULTS, rows=True) == [name]
        assert hollow(without, FAULTS.keys() - {name}, rows=True) == []


def test_pauses_and_kills_that_end_no_lease_prove_nothing() -> None:
    """Unless nobody was paused or killed."""
    for name in ("losses", "expiries", "refused stale writes"):
        without = ALL_ONCE - Counter({OPERATIONS[name]: 1})
        for chosen in ("pauses", "kills"):
            assert hollow(without, {chosen}, rows=True) == [name]
        assert hollow(without, {"wires"}, rows=True) == []
        # Without rows, there is nothing to refuse.
        lacks = [] if name == "refused stale writes" else [name]
        assert hollow(without, {"pauses"}, rows=False) == lacks


def test_run_without_locks_proves_nothing() -> None:
    """Nobody acquired or renewed a lease."""
    assert hollow(Counter(), {}, rows=True) == ["acquisitions", "renewals"]


def test_bound_is_of_runs_without_a_violation() -> None:
    """It says how rare what was not seen is; what was seen has no such bound."""
    found = Findings(Counter({"grant": 300, "fault loss: flushed": 2, EXCUSED: 3}))
    told = summary(found, {"losses"}, [])
    assert told["bound"] == 0.01
    assert (told["excused"], told["excused per loss"]) == (3, 1.5)
    found.never("overlap", "of two")
    assert summary(found, {"losses"}, [])["bound"] is None
    assert summary(found, {"losses"}, [])["violations"] == {"overlap": 1}


def test_reset_by_a_killed_server_is_passed_on() -> None:
    """Who waits behind a wire is told, as without it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = BadWire("127.0.0.1", server.getsockname()[1])
        try:
            with socket.create_connection(("127.0.0.1", wire.port), timeout=10) as client:
                end, (_host, port) = server.accept()
                assert eventually(lambda: wire.ports == {port})
                # Closed so, it is reset.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.close()
                assert client.recv(1) == b""
            assert eventually(lambda: wire.ports == set())
        finally:
            wire.close()


@pytest.mark.parametrize("lost", LOST.values())
def test_wire_loses_one_direction(lost: str) -> None:
    """With all that follows on that connection, which stays open until the wire is cut."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = BadWire("127.0.0.1", server.getsockname()[1])
        try:
            with socket.create_connection(("127.0.0.1", wire.port), timeout=10) as client:
                end, _address = server.accept()
                end.settimeout(10)
                sends, hears = (client, end) if lost == "requests" else (end, client)
                for text in (b"before", b"lost", b"behind it"):
                    wire.loses = lost if text == b"lost" else ""
                    sends.sendall(text)
                    # The other direction works; behind the second time, the wire has read the text.
                    for _ in range(2):
                        hears.sendall(text)
                        assert sends.recv(16) == text
                    if text == b"before":
                        assert hears.recv(16) == text
                wire.cut()
                assert hears.recv(16) == b""
                end.close()
        finally:
            wire.close()


def test_unexpected_error_is_found() -> None:
    """What nothing that goes wrong explains."""
    error = {"event": "error", "t": 1, "who": "1", "why": ""}
    assert broken({**error, "form": "LockUsageError"}) == ["unexpected error"]
    assert broken({**error, "form": "BackendUnavailable"}) == []


def drill(*arguments: str) -> str:
    """Run the command, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *arguments],
        cwd=ROOT,
        # Workers that are killed close nothing.
        env={**os.environ, "PYTHONDEVMODE": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_drill_runs_and_ends() -> None:
    """Workers are interrupted, stopped and killed, and leave nothing."""
    # Too short for one of each.
    said = drill(
        "--store", "memory", "--seed", "1", "--seconds", "4", "--workers", "2", "--minimum", "0"
    )  # fmt: skip
    assert "nothing that must never be" in said


@pytest.mark.nightly
@pytest.mark.faults
def test_servers_crash_and_lose_data(tmp_path: Path) -> None:
    """Nothing that must never be happens, although servers are killed and Redis is emptied."""
    figures = tmp_path / "figures.json"
    drill(
        "--store", "postgres", "--store", "redis", "--losses", "--promotions", "--seconds", "60",
        "--workers", "3", "--minimum", "0", "--json", str(figures),
    )  # fmt: skip
    told = json.loads(figures.read_text())["stores"]
    lost = {"postgres": {"timeouts"}, "redis": {"losses"}}
    for store, faults in lost.items():
        faults |= {"crashes", "promotions"}
        assert told[store]["violations"] == {}
        assert all(told[store]["faults"][name] >= 1 for name in faults)
