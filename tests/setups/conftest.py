"""What all set-ups need: the tests' databases, and names of their own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from django.db import connections
from pytest_django import DjangoDbBlocker

from django_distlock.models import HeldLock
from tests.shop.models import Row


# As in the contract suite: what locks do is committed, so nothing runs inside of a transaction.
@pytest.fixture(autouse=True)
def _databases(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    with django_db_blocker.unblock():
        yield
        for connection in connections.all(initialized_only=True):
            assert not connection.in_atomic_block
            connection.close()


@pytest.fixture
def key(_databases: None) -> Iterator[str]:
    """Give a text that only this test uses: a key, the start of several, the name of a counter."""
    name = f"t{secrets.token_hex(6)}"
    yield name
    Row.objects.filter(name__startswith=name).delete()
    HeldLock.objects.filter(key__startswith=name).delete()
