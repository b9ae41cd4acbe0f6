"""The configured lock backends, by alias."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final, cast

from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from .backends.base import BaseLockBackend
from .conf import BackendConfig, aliases, backend_config
from .core.extras import remedy
from .core.threads import in_child
from .exceptions import InvalidLockBackend

#: An alias that every project has, for callers that prefer other backends but can do without.
FALLBACK: Final = "in memory"
MEMORY: Final = "django_distlock.backends.memory.MemoryBackend"


class LockBackendHandler:
    """Lock backends by alias, as `DISTLOCK` configures them: `lock_backends["default"]`.

    There is one backend object per process and alias, shared by all threads, because the number of
    its connections is limited for the process as a whole.
    """

    def __init__(self) -> None:
        self._backends: dict[str, BaseLockBackend] = {}
        # Reentrant, because the creation of a backend may be interrupted by, or need, another.
        self._mutex = threading.RLock()

    def __getitem__(self, alias: str) -> BaseLockBackend:
        """Return the backend of `alias`.

        Raises:
            InvalidLockBackend: It is not configured, cannot be imported, or its settings break a
                rule.
        """
        backend = self._backends.get(alias)
        if backend is None:
            with self._mutex:
                backend = self._backends.get(alias) or self._make(alias)
                backend = self._backends.setdefault(alias, backend)
        return backend

    def __iter__(self) -> Iterator[str]:
        return iter(aliases())

    def all(self) -> list[BaseLockBackend]:
        """Return every configured backend."""
        return [self[alias] for alias in self]

    def reset(self) -> None:
        """Forget the backends, after a change of settings. Held leases keep their backends."""
        with self._mutex:
            forgotten = [*self._backends.values()]
            self._backends.clear()
        for backend in forgotten:
            backend._keep_no_connections()

    def _begin_in_child(self) -> None:
        # A thread of the parent may have held the mutex, and does not exist in the child.
        self._mutex = threading.RLock()

    def _make(self, alias: str) -> BaseLockBackend:
        fallback = BackendConfig(alias=FALLBACK, backend=MEMORY)
        config = fallback if alias == FALLBACK else backend_config(alias)
        where = f"DISTLOCK[{alias!r}]"
        try:
            backend_class = import_string(config.backend)
        except (ImportError, TypeError, ValueError) as error:  # The last two: a leading dot
            raise InvalidLockBackend(
                f"{where}: BACKEND {config.backend!r} cannot be imported: {error}{remedy(error)}"
            ) from error
        if not (isinstance(backend_class, type) and issubclass(backend_class, BaseLockBackend)):
            raise InvalidLockBackend(
                f"{where}: BACKEND {config.backend!r} is not a subclass of BaseLockBackend."
            )
        try:
            return backend_class(config, **config.options)
        except TypeError as error:
            # An option is missing, or has a type that a backend of the project does not accept.
            raise InvalidLockBackend(
                f"{where}: {backend_class.__name__} cannot be made with these OPTIONS: {error}"
            ) from error


class _DefaultBackend:
    """A proxy of `lock_backends["default"]`, looked up at each use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lock_backends["default"], name)

    def __repr__(self) -> str:
        return "<default_lock_backend>"


lock_backends = LockBackendHandler()
default_lock_backend = cast(BaseLockBackend, _DefaultBackend())


def _forget(*, setting: str, **_: Any) -> None:
    if setting in ("DISTLOCK", "DISTLOCK_HOLDER", "CACHES", "DATABASES", "DATABASE_ROUTERS"):
        lock_backends.reset()


setting_changed.connect(_forget, dispatch_uid="django_distlock.handler")

in_child(lock_backends._begin_in_child)
