"""Where the project has Django's admin, what a user does is in its history too."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.test import override_settings

from django_distlock import lock_backends
from django_distlock.core.keys import new_token
from django_distlock.inspection import (
    cleanup,
    expire_soon,
    force_release,
    pause,
    request_stop,
    resume,
)
from django_distlock.models import HeldLock, LockEvent
from tests.contract.locking import rolled_back

from .databases import Routed
from .operating import event_of


@pytest.fixture
def user(key: str) -> Iterator[User]:
    """Give a user with a row."""
    user = User.objects.create(username=key)
    yield user
    User.objects.filter(pk=user.pk).delete()


@pytest.fixture
def held(key: str) -> str:
    """Give a key that somebody holds."""
    lock_backends["postgres"].acquire(key, new_token(), 60)
    return key


def test_user_who_takes_a_key_is_in_the_log(user: User, log: Any, held: str) -> None:
    """With the key, the fence and the reason; as a deletion, of the model of locks."""
    outcome = force_release(held, backend="postgres", actor=user, reason="it hangs")
    (entry,) = log.objects.filter(user=user)
    assert (entry.object_repr, entry.is_deletion()) == (held, True)
    assert entry.content_type.model == "heldlock"
    assert entry.object_id == urlencode({"backend": "postgres", "key": held})
    assert "it hangs" in entry.get_change_message()
    assert f"fence {outcome.fence_before}" in entry.get_change_message()
    assert event_of(held).actor == user.username


def test_each_operation_of_a_user_is_in_the_log(user: User, log: Any, held: str) -> None:
    """In the order in which they were done, each by its name; a cleanup is about no key."""
    expire_soon(held, 50, backend="postgres", actor=user)
    request_stop(held, backend="postgres", actor=user)
    pause(held, 60, backend="postgres", actor=user)
    resume(held, backend="postgres", actor=user, reason="all is well")
    HeldLock.objects.filter(key=held).update(free_at=lock_backends["postgres"].clock())
    assert cleanup(backend="postgres", actor=user).is_done
    *entries, last = log.objects.filter(user=user).order_by("pk")
    told = [each.get_change_message().split()[0] for each in entries]
    assert told == ["expire_soon", "request_stop", "pause", "resume"]
    assert last.object_repr == ""
    # Its page is that of the key: not every store has rows for counters.
    assert {each.content_type.model for each in entries} == {"heldlock"}
    assert not any(each.is_deletion() for each in entries)


def test_what_changed_nothing_is_not_in_the_log(user: User, log: Any, key: str) -> None:
    """Nor what somebody did who is no user of the project."""
    force_release(key, backend="postgres", actor=user, reason="it hangs")
    resume(key, backend="postgres", actor=user)
    lock_backends["postgres"].acquire(key, new_token(), 60)
    force_release(key, backend="postgres", actor="root@web-1", reason="it hangs")
    assert not log.objects.filter(object_repr=key).exists()
    assert event_of(key).actor == "root@web-1"


def test_log_that_cannot_be_written_undoes_nothing(
    log: Any, held: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The key is taken, the caller's transaction goes on, and the event is kept."""
    nobody = User(pk=2_000_000_000, username="ghost")
    assert log is not None
    with caplog.at_level(logging.WARNING), rolled_back():
        # The constraint is looked at when the transaction ends.
        connections["default"].cursor().execute("SET CONSTRAINTS ALL IMMEDIATE")
        outcome = force_release(held, backend="postgres", actor=nobody, reason="it hangs")
        assert outcome.is_done
        assert User.objects.filter(pk=nobody.pk).count() == 0
    assert "could not be written to the admin log" in caplog.text
    assert event_of(held).kind == LockEvent.Kind.FORCED


def test_log_is_in_a_file_that_others_write_to(
    log: Any, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite refuses at once what is written behind a read that another commit has overtaken."""
    connection, look_up = connections["sqlite"], type(ContentType.objects).get_for_model

    def overtaken(*args: Any, **more: Any) -> ContentType:
        found = look_up(*args, **more)
        name = connection.settings_dict["NAME"]
        with closing(sqlite3.connect(name, isolation_level=None)) as other:
            other.execute("UPDATE auth_user SET first_name = username")
        return found

    monkeypatch.setattr(type(ContentType.objects), "get_for_model", overtaken)
    ContentType.objects.clear_cache()
    user = User.objects.using("sqlite").create(username=held)
    with connection.schema_editor() as editor:
        editor.create_model(log)
    try:
        with override_settings(DATABASE_ROUTERS=[Routed("sqlite", log)]):
            force_release(held, backend="postgres", actor=user, reason="it hangs")
        assert [each.object_repr for each in log.objects.using("sqlite")] == [held]
    finally:
        # A user's entries go first, and their deletion needs the table.
        log.objects.using("sqlite").filter(object_repr=held).delete()
        User.objects.using("sqlite").filter(pk=user.pk).delete()
        with connection.schema_editor() as editor:
            editor.delete_model(log)
