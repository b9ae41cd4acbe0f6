"""What backends of others are held to as well: see `django_distlock.testing.contract`."""

# ruff: noqa: D102 - the base class describes the fixtures

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.testing.contract import BackendContract
from tests.backends import Registered

from .stores import Elapse, Store


class TestBackend(BackendContract):
    """Every backend of the registry, with the clocks of their stores and without a wait."""

    ages = 10 * 365 * 86_400

    # Processes of these tests have settings of their own: `test_races` has such a race.
    test_one_of_many_processes_is_granted = None  # type: ignore[assignment]

    @pytest.fixture
    def backend(self, store: Store) -> BaseLockBackend:
        return store.backend

    @pytest.fixture
    def elapse(self, store: Store) -> Elapse:
        return store.elapse

    @pytest.fixture
    def now(self, store: Store) -> Callable[[], datetime]:
        return store.now

    @pytest.fixture
    def is_next(self, registered: Registered) -> Callable[..., bool]:
        return registered.is_next
