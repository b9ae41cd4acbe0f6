"""Objects in an object store that refuse stale writers, on a server that speaks S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from django_distlock import InvalidArgument, LockError, LockUsageError, distlock
from django_distlock.core.errors import FenceRejected
from django_distlock.core.fences import FENCE_MAX
from django_distlock.fencing import objects
from django_distlock.fencing.objects import FencedObject
from django_distlock.fencing.rejecting import Fence
from tests.contract.helpers import at_once
from tests.processes import spawn

from .histories import Attempt, attempted, rising, wrong
from .object_store import client_of, object_store

BUCKET = "bucket"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Give the address of a server with an empty bucket."""
    with object_store() as url:
        client = client_of(url)
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield url


@pytest.fixture
def client(server: str) -> Iterator[Any]:
    """Give a client."""
    client = client_of(server)
    yield client
    client.close()


@pytest.fixture
def stored(client: Any, key: str) -> FencedObject:
    """Give an object that nobody wrote yet."""
    return FencedObject(client, BUCKET, key)


def by(fence: int) -> Fence:
    """Give a fence of any key."""
    return Fence("ledger", fence)


def content(stored: FencedObject) -> bytes:
    """Return all that is in the object, as others see it."""
    answer = stored.client.get_object(Bucket=BUCKET, Key=stored.key)
    found: bytes = answer["Body"].read()
    return found


class Meddled:
    """A client before whose writes something happens.

    Args:
        before: What happens, at the first write or at each.
    """

    def __init__(self, client: Any, before: Callable[[], object], *, times: int = 1):
        self.client = client
        self.before = before
        self.times = times
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def put_object(self, **arguments: Any) -> Any:
        """Write, behind what happens."""
        self.writes += 1
        if self.writes <= self.times:
            self.before()
        return self.client.put_object(**arguments)


# One after another


def test_data_come_back(stored: FencedObject) -> None:
    """What a holder writes it reads, and may write again with the same fence."""
    assert stored.get(by(5)) is None
    stored.put(b"\x00\xff\n", by(5))
    assert stored.get(by(5)) == b"\x00\xff\n"
    stored.put(b"", by(6))
    assert stored.get(by(6)) == stored.read() == b""


def test_lease_is_what_one_writes_with(stored: FencedObject) -> None:
    """A lease and the next one of its key are in order."""
    lock = distlock(stored.key, backend="memory")
    with lock as before:
        stored.put(b"first", before)
    with lock as lease:
        assert stored.get(lease) == b"first"
        with pytest.raises(FenceRejected):
            stored.put(b"late", before)
    assert stored.read() == b"first"


@pytest.mark.parametrize("operation", ["get", "put", "delete"])
def test_lower_fence_is_refused_and_changes_nothing(stored: FencedObject, operation: str) -> None:
    """Whatever a stale holder asks, the error tells both fences."""
    stored.put(b"new", by(7))
    before = content(stored)
    arguments = (b"old", by(6)) if operation == "put" else (by(6),)
    with pytest.raises(FenceRejected, match="fence 7.*refuses fence 6") as caught:
        getattr(stored, operation)(*arguments)
    assert (caught.value.current, caught.value.fence, caught.value.key) == (7, 6, "ledger")
    assert stored.key in caught.value.row
    assert content(stored) == before


def test_first_read_refuses_lower_fences_from_then_on(stored: FencedObject) -> None:
    """Who read older data may not write behind somebody who read them to change them."""
    stored.put(b"old", by(5))
    assert stored.get(by(6)) == b"old"
    with pytest.raises(FenceRejected):
        stored.put(b"late", by(5))
    assert stored.get(by(6)) == b"old"


def test_reading_nothing_counts_as_a_read(stored: FencedObject) -> None:
    """Where there is no object yet, the first look fences as well."""
    assert stored.get(by(6)) is None
    with pytest.raises(FenceRejected):
        stored.put(b"late", by(5))
    assert stored.read() is None


def test_second_read_with_a_fence_writes_nothing(stored: FencedObject) -> None:
    """Only a new fence costs a write."""
    stored.put(b"x", by(5))
    counted = Meddled(stored.client, lambda: None, times=0)
    stored.client = counted
    for _ in range(2):
        assert stored.get(by(6)) == b"x"
    assert counted.writes == 1


def test_plain_read_raises_nothing(stored: FencedObject) -> None:
    """Whoever only looks is in nobody's way, and makes no object."""
    assert stored.read() is None
    with pytest.raises(stored.client.exceptions.NoSuchKey):
        content(stored)
    stored.put(b"x", by(5))
    assert stored.read() == b"x"
    stored.put(b"y", by(5))


def test_delete_keeps_the_fence(stored: FencedObject) -> None:
    """The data are gone, and a stale writer does not bring them back."""
    stored.put(b"x", by(5))
    stored.delete(by(6))
    assert stored.get(by(6)) is stored.read() is None
    with pytest.raises(FenceRejected):
        stored.put(b"late", by(5))
    stored.put(b"y", by(7))
    assert stored.read() == b"y"


def test_fence_stands_before_the_data(stored: FencedObject) -> None:
    """As documented, for those who read the object without this package."""
    stored.put(b"line 1\nline 2\n", by(42))
    assert content(stored) == b"distlock-fence 000000000000042 data\nline 1\nline 2\n"
    stored.delete(by(FENCE_MAX))
    assert content(stored) == b"distlock-fence 900000000000000 none\n"
    answer = stored.client.head_object(Bucket=BUCKET, Key=stored.key)
    assert answer["Metadata"] == {"distlock-fence": str(FENCE_MAX)}
    with pytest.raises(FenceRejected, match=str(FENCE_MAX)):
        stored.get(by(FENCE_MAX - 1))


@pytest.mark.parametrize("data", [b"", b"plain", b"distlock-fence 000000000000099 data\nx"])
def test_object_that_was_never_fenced_is_taken_over(stored: FencedObject, data: bytes) -> None:
    """Any fence passes, the data stay what they were, and from then on lower ones are refused."""
    stored.client.put_object(Bucket=BUCKET, Key=stored.key, Body=data)
    assert stored.read() == data
    assert stored.get(by(5)) == data
    with pytest.raises(FenceRejected):
        stored.put(b"late", by(4))
    assert stored.get(by(6)) == data


@pytest.mark.parametrize(
    ("body", "metadata"),
    [
        (b"no line", "000000000000005"),
        (b"distlock-fence 000000000000006 data\nx", "000000000000005"),
        (b"distlock-fence 000000000000005 data\nx", "5"),
        (b"distlock-fence 000000000000005 data\nx", "high"),
    ],
)
def test_fence_that_was_tampered_with_is_named(
    stored: FencedObject, body: bytes, metadata: str
) -> None:
    """Nobody guesses which of two fences counts."""
    stored.client.put_object(
        Bucket=BUCKET, Key=stored.key, Body=body, Metadata={"distlock-fence": metadata}
    )
    with pytest.raises(LockUsageError, match="FencedObject"):
        stored.get(by(9))
    assert content(stored) == body


@pytest.mark.parametrize("bad", ["text", None, 5])
def test_data_that_are_no_bytes_are_refused(stored: FencedObject, bad: Any) -> None:
    """Before anything is asked; None would remove the data."""
    with pytest.raises(InvalidArgument, match="bytes"):
        stored.put(bad, by(5))
    assert stored.read() is None


def test_lease_without_a_fence_is_refused(stored: FencedObject) -> None:
    """A block that runs without its lock has nothing to write with."""
    with distlock(stored.key, backend="memory"):

        def run() -> bool:
            with distlock(stored.key, backend="memory", wait=0, on_conflict="run") as lease:
                for ask in (stored.get, stored.delete, partial(stored.put, b"x")):
                    with pytest.raises(LockUsageError, match="no fence"):
                        ask(lease)
            return True

        assert at_once([run]) == [True]
    assert stored.read() is None


@pytest.mark.parametrize("operation", ["get", "put", "read"])
def test_bucket_that_is_not_there_is_no_missing_object(
    client: Any, key: str, operation: str
) -> None:
    """What the client raises comes through, at once."""
    arguments = {"get": (by(5),), "put": (b"x", by(5)), "read": ()}[operation]
    with pytest.raises(client.exceptions.NoSuchBucket):
        getattr(FencedObject(client, "nowhere", key), operation)(*arguments)


# Somebody comes between a look and a write


@pytest.mark.parametrize("there", [b"same", None], ids=["over an object", "over nothing"])
@pytest.mark.parametrize("operation", ["put", "delete", "get"])
def test_higher_fence_in_between_wins(
    stored: FencedObject, operation: str, there: bytes | None
) -> None:
    """Also where it only read: the data stayed the same, and their ETag must not."""
    if there is not None:
        stored.put(there, by(4))
    stale = FencedObject(Meddled(stored.client, lambda: stored.get(by(7))), BUCKET, stored.key)
    arguments = (b"late", by(5)) if operation == "put" else (by(5),)
    with pytest.raises(FenceRejected, match="fence 7"):
        getattr(stale, operation)(*arguments)
    assert stored.get(by(7)) == there


def test_lower_fence_in_between_is_written_over(stored: FencedObject) -> None:
    """The one with the higher fence looks again, and gets through."""
    meddled = Meddled(stored.client, lambda: stored.put(b"early", by(4)))
    FencedObject(meddled, BUCKET, stored.key).put(b"new", by(5))
    assert stored.get(by(5)) == b"new"
    assert meddled.writes == 2


def test_read_gives_what_is_there_when_its_fence_counts(stored: FencedObject) -> None:
    """What a lower fence wrote in between is read, and no earlier data."""
    stored.put(b"earlier", by(3))
    meddled = Meddled(stored.client, lambda: stored.put(b"early", by(4)))
    assert FencedObject(meddled, BUCKET, stored.key).get(by(5)) == b"early"


def test_object_that_was_removed_in_between_is_made(stored: FencedObject) -> None:
    """A plain removal takes the fence along; the write goes on."""
    stored.put(b"x", by(4))
    remove = partial(stored.client.delete_object, Bucket=BUCKET, Key=stored.key)
    FencedObject(Meddled(stored.client, remove), BUCKET, stored.key).put(b"y", by(5))
    assert stored.read() == b"y"


@pytest.mark.parametrize("operation", ["put", "get"])
def test_endless_meddling_ends_in_an_error(
    stored: FencedObject, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many tries nothing was written, and the error says what happened."""
    monkeypatch.setattr(objects, "_MAX_PAUSE", 0.001)
    numbers = iter(range(100))
    meddled = Meddled(stored.client, lambda: stored.put(b"%d" % next(numbers), by(4)), times=1000)
    arguments = (b"x", by(5)) if operation == "put" else (by(5),)
    with pytest.raises(LockError, match=f"{objects.TRIES} times in a row") as caught:
        getattr(FencedObject(meddled, BUCKET, stored.key), operation)(*arguments)
    assert caught.value.code == "aborted"
    assert meddled.writes == objects.TRIES
    assert stored.read() == b"%d" % (objects.TRIES - 1)


@pytest.mark.parametrize("operation", ["put", "get"])
def test_write_whose_answer_was_lost_may_be_sent_again(
    stored: FencedObject, operation: str
) -> None:
    """A client that repeats by itself is told that the object is another one: it is its own."""
    stored.put(b"x", by(4))
    arguments = {"put": (b"y", by(5)), "get": (by(5),)}[operation]
    assert getattr(FencedObject(_Repeating(stored.client), BUCKET, stored.key), operation)(
        *arguments
    ) == (b"x" if operation == "get" else None)
    assert stored.read() == (b"x" if operation == "get" else b"y")
    with pytest.raises(FenceRejected, match="fence 5"):
        stored.get(by(4))


class _Repeating:
    """A client that sends each write twice, and answers with the second answer."""

    def __init__(self, client: Any):
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def put_object(self, **arguments: Any) -> Any:
        """Write twice."""
        self._client.put_object(**arguments)
        return self._client.put_object(**arguments)


# Many at once

LAST = 25


def test_no_lower_fence_lands_behind_a_higher_one(server: str, stored: FencedObject) -> None:
    """Three processes come with fences that mostly rise; the order is right throughout."""
    target = "tests.integration.test_fenced_objects:write_rising"
    workers = [spawn(target, server, stored.key, seed) for seed in range(3)]
    try:
        for worker in workers:
            worker.wait_for("ready", timeout=60)
        for worker in workers:
            worker.send("go")
        together = [Attempt(*each) for worker in workers for each in worker.result(timeout=90)]
    finally:
        for worker in workers:
            worker.kill()
    assert wrong(together) == []
    assert {each.passed for each in together} == {True, False}
    assert stored.read() == b"%d" % LAST


def write_rising(url: str, key: str, seed: int) -> list[Attempt]:
    """Be a process of writers."""
    client = client_of(url)
    stored = FencedObject(client, BUCKET, key)
    client.head_bucket(Bucket=BUCKET)
    print("ready")
    input()

    def read(fence: int) -> None:
        found = stored.get(by(fence))
        # Whoever may read with this fence finds no higher one's data.
        assert found is None or int(found) <= fence

    def write(fence: int) -> None:
        stored.put(b"%d" % fence, by(fence))

    fences = rising(LAST, seed)
    history = [attempted(fence, act) for fence in fences for act in (read, write)]
    client.close()
    return history


def test_holders_of_one_fence_lose_no_update(server: str, key: str) -> None:
    """Threads that make an object at once: one makes it, and each of them gets through."""

    def put(number: int) -> bool:
        client = client_of(server)
        try:
            FencedObject(client, BUCKET, key).put(b"%d" % number, by(5))
        finally:
            client.close()
        return True

    assert at_once([partial(put, number) for number in range(6)]) == [True] * 6
    client = client_of(server)
    assert FencedObject(client, BUCKET, key).read() in {b"%d" % number for number in range(6)}
    client.close()
