"""What is held can be read, found by its token, and listed."""

from __future__ import annotations

import unicodedata

import pytest

from django_distlock import InvalidArgument, held_keys
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Holder, Record
from tests.backends import Registered
from tests.integration.databases import statements_on

from .helpers import KEEPS_EXPIRED, finds, held, listed, take
from .locking import lock_of
from .stores import Elapse, Store

LISTS = pytest.mark.requires("supports_listing")


def test_read_shows_what_is_held(backend: BaseLockBackend, key: str) -> None:
    """A held key has a record, by its token too; a free, released or unknown one has none."""
    assert backend.read(key) is None
    grant = take(backend, key)
    assert isinstance(backend.read(key), Record)
    assert finds(backend, grant.token, backend.read(key))
    assert finds(backend, new_token(), None)
    backend.release(grant)
    assert backend.read(key) is None
    assert finds(backend, grant.token, None)


def test_many_keys_are_read_at_once(backend: BaseLockBackend, key: str) -> None:
    """In the order of the keys, each as often as it is asked for; free ones have no record."""
    for name in "ab":
        take(backend, f"{key}-{name}", holder=Holder(host=name))
    names = [f"{key}-{name}" for name in "bxab"]
    assert backend.records.of(names) == [backend.read(name) for name in names]
    assert backend.records.of([]) == []


@pytest.mark.aliases("memory", "redis", why="it asks for many keys at once, which see above")
def test_held_keys_have_their_holders(registered: Registered, key: str) -> None:
    """Keys that nobody holds are left out."""
    names = [f"{key}-{name}" for name in "bab"]
    with lock_of(registered, f"{key}-a", metadata={"worker": 7}) as lease:
        assert held_keys(names, backend=registered.alias) == {lease.key: lease.holder}
    assert held_keys(iter(names), backend=registered.alias) == {}
    with pytest.raises(InvalidArgument, match="several keys"):
        held_keys(names[0], backend=registered.alias)
    with pytest.raises(InvalidArgument, match="empty"):
        held_keys([f"{key}-a", ""], backend=registered.alias)


@pytest.mark.aliases("postgres")
def test_many_keys_are_one_query(backend: BaseLockBackend, key: str) -> None:
    """However many they are."""
    backend.records.of([key])
    with statements_on(backend.using) as statements:
        backend.records.of([f"{key}-{number}" for number in range(900)])
    assert len([each for each in statements if "heldlock" in each]) == 1


def test_reading_changes_nothing(backend: BaseLockBackend, store: Store, key: str) -> None:
    """A read leaves a live record as it is, and an expired one where the store keeps it."""
    grant = take(backend, key, 5)
    before = held(backend, key)
    assert finds(backend, grant.token, before)
    backend.list(key)
    assert held(backend, key) == before
    if store.registered.store in KEEPS_EXPIRED.args:
        store.elapse(6.1)
        assert backend.read(key) is None
        assert finds(backend, grant.token, None)
        assert backend.records.of([key]) == [None]
        backend.list(key)
        assert store.has_record(key)


@LISTS
@pytest.mark.requires("supports_ttl")
def test_list_leaves_out_what_is_over(
    backend: BaseLockBackend, registered: Registered, elapse: Elapse, key: str
) -> None:
    """Released and expired locks are not shown; one without expiry is."""
    take(backend, f"{key}-expired", 5)
    take(backend, f"{key}-endless", None)
    elapse(6.1)
    backend.release(take(backend, f"{key}-released"))
    take(backend, f"{key}-live")
    assert registered.ordered(listed(backend, key)) == [f"{key}-endless", f"{key}-live"]


#: Prefixes, and ends of keys that start with them or not: what means something else to a database
#: or to Redis, and texts that some collation takes for another. Few enough for locks of sessions.
TEXTS = {
    ("", "%", "_", "a_b", "a%", "\\", "Ab", "'"): (
        "%", "%a", "%%", "_", "_a", "__", "a", "aa", "ab", "a%", "a%b", "aa%", "A%", "\\", "\\%",
        "\\_", "a_b", "a_bc", "aXb", "A_b", "/", "Ab", "Abc", "AB", "aB", "Áb", "'", "''",
        "' OR 1=1 --", '"', ":a:b", "/../b", " a ", "{a}", "%s%%", "\n", "\x01", ".",
    ),
    ("", "a:b", "x*", "é", "e\u0301a", "z ", "\U0010ffff", "a\U0010ffff", "\ud7ff"): (
        "a", "a:", "a:b", "a:b:c", "a:a", "a:c", "a;b", "x", "xy", "x*", "x*y", "x[", "é", "éa",
        "e", "É", "è", "z", "za", "z ", "z  ", "z a", "\uffff", "\ue000", "\ud7fe", "\ud7ff",
        "\ud7ffa", "\U0010ffff", "\U0010ffff\U0010ffff", "\U0010ffffa", "a\uffff", "a\U0010fffe",
        "a\U0010ffff", "a\U0010ffffz",
    ),
}  # fmt: skip


@LISTS
def test_prefix_is_plain_text(backend: BaseLockBackend, key: str) -> None:
    """A prefix means itself: no wildcard, no escape, no case, no accent, and the whole of it."""
    for prefixes, ends in TEXTS.items():
        grants = [take(backend, f"{key}{end}") for end in ends]
        for prefix in prefixes:
            plain = unicodedata.normalize("NFC", prefix)
            expected = sorted(f"{key}{end}" for end in ends if end.startswith(plain))
            assert sorted(listed(backend, f"{key}{prefix}")) == expected, ascii(prefix)
        assert all(map(backend.release, grants))


@LISTS
def test_no_prefix_lists_all(backend: BaseLockBackend, key: str) -> None:
    """Without a prefix every held lock is shown."""
    keys = {f"{start}{key}" for start in ("A", "z", "%", "\U0010ffff", "0", " ")}
    for each in keys:
        take(backend, each)
    assert keys <= set(listed(backend))


@LISTS
def test_pages_show_each_lock_once(
    backend: BaseLockBackend, registered: Registered, key: str
) -> None:
    """Each lock is on one page, whatever their size, and there in the order of the keys."""
    keys = [f"{key}-{end}" for end in ("", "a", "A", "aa", "b:%", "é", "\U0010ffff")]
    for each in keys:
        take(backend, each)
    whole = registered.ordered(listed(backend, f"{key}-", limit=10_000))
    assert sorted(whole) == sorted(keys)
    for limit in (1, 3, 7, 8):
        assert registered.ordered(listed(backend, f"{key}-", limit=limit)) == whole
        first = backend.list(f"{key}-", limit=limit)
        assert len(first.records) == min(limit, len(keys))
        assert [each.key for each in first.records] == sorted(each.key for each in first.records)
        assert list(first.records) == [backend.read(record.key) for record in first.records]
        assert (first.cursor is None) == (limit >= len(keys))


@LISTS
@pytest.mark.stores(
    "memory", "sqlite", "postgresql", "mysql", why="its listings have no order through pages"
)
def test_pages_bear_changes_between_them(backend: BaseLockBackend, key: str) -> None:
    """What is held all the time is seen once, though others come and go between the pages."""
    grants = {name: take(backend, f"{key}-{name}") for name in "bdfh"}
    first = backend.list(key, limit=2)
    assert [record.key for record in first.records] == [f"{key}-b", f"{key}-d"]
    # The lock at the cursor goes; one comes before it, and one behind.
    backend.release(grants["d"])
    take(backend, f"{key}-a")
    take(backend, f"{key}-g")
    rest = backend.list(key, first.cursor, limit=10)
    assert [record.key for record in rest.records] == [f"{key}-{name}" for name in "fgh"]


@LISTS
def test_pages_miss_nothing_that_stays(backend: BaseLockBackend, key: str) -> None:
    """Whatever the order: what is held all the time is seen, and no page is too long."""
    grants = {each.key: each for each in (take(backend, f"{key}-{name}") for name in "bdfhjl")}
    seen: list[str] = []
    cursor = None
    # Redis looks through the keys of other tests as well, so many pages may be empty.
    for turn in range(5000):
        page = backend.list(key, cursor, limit=2)
        assert len(page.records) <= 2
        seen += [record.key for record in page.records]
        if turn == 0:
            gone = seen[-1]
            # The lock at the cursor goes, and others come.
            backend.release(grants.pop(gone))
        if turn < 60:
            take(backend, f"{key}-{turn:02}")
        if (cursor := page.cursor) is None:
            break
    assert cursor is None
    assert grants.keys() <= set(seen)


@LISTS
def test_list_filters_by_host_and_task(
    backend: BaseLockBackend, registered: Registered, key: str
) -> None:
    """Only what the host, the task, or both hold is shown, and each page is filled with it."""
    for number in range(6):
        host, task = f"{key}-host-{number % 2}", f"{key}-task-{number % 3}"
        take(backend, f"{key}-{number}", holder=Holder(host=host, task_id=task))
    take(backend, f"{key}-6", holder=Holder(host=f"{key}-host-0"))
    host, task = f"{key}-host-0", f"{key}-task-2"
    on_host = registered.ordered(listed(backend, key, host=host, limit=2))
    assert on_host == [f"{key}-{n}" for n in (0, 2, 4, 6)]
    of_task = registered.ordered(listed(backend, key, task_id=task, limit=1))
    assert of_task == [f"{key}-{n}" for n in (2, 5)]
    assert listed(backend, key, host=host, task_id=task) == [f"{key}-2"]
    assert registered.ordered(listed(backend, host=host)) == on_host
    assert listed(backend, key, host=host.upper()) == []
    assert listed(backend, key, task_id="") == []
    assert listed(backend, f"{key}-4", host=host) == [f"{key}-4"]


@pytest.mark.aliases("memory", "advisory", why="all stores make the same grants and records")
def test_records_hide_their_tokens(backend: BaseLockBackend, key: str) -> None:
    """The text of grants and records does not contain the token."""
    grant = take(backend, key)
    for value in (grant, held(backend, key), backend.list(key), backend.extend(grant)):
        assert grant.token not in repr(value)
        assert grant.token not in str(value)
