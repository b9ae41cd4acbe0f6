"""What can go wrong, as one tree with codes and facts. Drawn in `django_distlock.exceptions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .secrets import without_credentials

if TYPE_CHECKING:
    from .records import Holder


def shown(value: object) -> str:
    """Return `value` as messages show it: short, without passwords, and never an error itself."""
    try:
        # Before it is cut short, which may take the end that an address is known by; and not of a
        # text of any length.
        text = without_credentials(repr(value)[:1000])
    except Exception:  # noqa: BLE001 - whatever a repr raises, such as that of a huge int
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:79]}…"


#: What a store did that has answered, by the code of the error.
_DID: Final = {
    "auth_failed": "denied access",
    "network_timeout": "timed out",
    "rate_limited": "has reached a limit",
    "service_unavailable": "is unavailable",
}


class LockError(Exception):
    """The root of all errors of this package.

    Attributes:
        code: A short word for programs: `"internal"`, `"aborted"` or a subclass's own.
        key: The key it happened to, where there is one.
    """

    code = "internal"

    def __init__(self, message: str = "", *, key: str | None = None, code: str | None = None):
        super().__init__(message)
        self.key = key
        if code is not None:
            self.code = code


class LockNotAcquired(LockError):
    """Somebody else held the key for as long as the caller was willing to wait.

    Or its holder waits for a key that the caller keeps; then the error comes before that time.

    `code` is `"acquisition_timeout"`; `"deadlock"` where the database has found one among
    transactions; `"aborted"` where a candidate of `leader()` was stopped; `"backlog_full"` where
    `max_queued` calls of a task wait already; `"superseded"`, never raised, where a later call of
    a task runs.

    Attributes:
        holder: Who holds it, if the store could tell.
        held_for: Seconds it has been held, by the store's clock, or None.
        expires_in: Seconds until its holder's lease ends, or None (unknown, or no expiry).
        settled: Whether the holder is done, and the key is kept after its run on purpose.
        lock: The `Lock` that was not granted: which of two, where blocks are in each other. Copies
            and pickles have None, and so has the error of what is no `Lock`.
    """

    code = "acquisition_timeout"
    lock: object | None = None

    def __init__(
        self,
        message: str = "",
        *,
        key: str | None = None,
        holder: Holder | None = None,
        held_for: float | None = None,
        expires_in: float | None = None,
        settled: bool = False,
        code: str | None = None,
    ):
        super().__init__(message, key=key, code=code)
        self.holder = holder
        self.held_for = held_for
        self.expires_in = expires_in
        self.settled = settled

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has another one, and may not be able to load this.
        facts = {name: value for name, value in vars(self).items() if name != "lock"}
        return type(self), self.args, facts


class LockLost(LockError):
    """The lease ended before the work under it did."""

    code = "lost"


class FenceRejected(LockError):
    """A write, or a read before it, came with an older fence than what it was about. It was undone.

    Attributes:
        row: What refused it, such as `"shop.Payment 12"`, or `"The key of a new shop.Payment"`.
        current: The fence that is on it.
        fence: The fence that came.
    """

    code = "fence_rejected"

    def __init__(
        self,
        message: str = "",
        *,
        key: str | None = None,
        row: str = "",
        current: int | None = None,
        fence: int | None = None,
    ):
        super().__init__(message, key=key)
        self.row = row
        self.current = current
        self.fence = fence


class BackendUnavailable(LockError):
    """The store is unavailable or denied access: nothing is known about the key.

    `code` is `"service_unavailable"`, `"network_timeout"`, `"auth_failed"` or `"rate_limited"`.
    """

    code = "service_unavailable"

    @classmethod
    def of(
        cls, store: str, error: object, code: str, key: str | None = None, *, answered: bool = False
    ) -> BackendUnavailable:
        """Return the error of a store that could not be used, and say what the store did.

        Args:
            store: What the message begins with.
            error: What the driver said.
            answered: Whether the error is an answer of the store.
        """
        # PostgreSQL's drivers have no code for a connection that was never made, only this text.
        if "failed: FATAL:" in str(error) and not answered:
            did = "refused the connection"
        else:
            silent = not answered and code in ("network_timeout", "service_unavailable")
            did = "did not answer" if silent else _DID[code]
        return cls(f"{store} {did}: {error}", key=key, code=code)

    @property
    def is_denied(self) -> bool:
        """Whether the store answered, and denied access: the settings are wrong."""
        return self.code == "auth_failed"


class InvalidArgument(LockError, ValueError):
    """A key, token, duration or other argument breaks a rule. Nothing was touched."""

    code = "invalid_argument"


class LockUsageError(LockError):
    """Used in a way that cannot work. The message says what to do instead.

    `code` is `"reentrant"`, `"foreign_context"`, `"unsupported"` or `"self_blocked"`.
    """

    code = "unsupported"
