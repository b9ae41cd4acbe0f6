"""Permissions of operators; signals and the admin's log of who did what, and why."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.apps import apps
from django.db import router, transaction

from ..backends.base import BaseLockBackend
from ..core.errors import InvalidArgument, shown
from ..core.interruptions import pass_on
from ..core.logs import log_fields
from ..core.metadata import is_plain_text
from ..core.records import Holder
from ..core.wording import printable
from ..signals import lock_forced, lock_operated, tell

#: Characters of a reason, and of an actor's name.
MAX_TEXT = 200

logger = logging.getLogger("django_distlock")


class Operation(enum.StrEnum):
    """The operations of `inspection`, by their names in events, signals and JSON."""

    VIEW = "view"
    FORCE_RELEASE = "force_release"
    EXPIRE_SOON = "expire_soon"
    REQUEST_STOP = "request_stop"
    CLEANUP = "cleanup"
    PAUSE = "pause"
    RESUME = "resume"

    @property
    def codename(self) -> str:
        """The codename of its permission, as the migrations create it."""
        about_counter = self in (Operation.PAUSE, Operation.RESUME)
        return f"{self.value}_{'fencecounter' if about_counter else 'heldlock'}"

    @property
    def permission(self) -> str:
        """The permission's name for `user.has_perm()`."""
        return f"django_distlock.{self.codename}"


def may(user: Any, operation: Operation | str) -> bool:
    """Return whether a user has the permission for an operation.

    Args:
        user: One of `django.contrib.auth`, or what its backends take for one.
        operation: Such as `"force_release"`; `"view"` allows listing and showing.

    Raises:
        ValueError: There is no such operation.
    """
    return bool(user.has_perm(Operation(operation).permission))


@dataclass(frozen=True, slots=True)
class Order:
    """An operation, the actor who wants it, and the reason.

    Args:
        actor: A user of the project, or a text of 1 to 200 characters that names the actor.
        reason: Why, in at most 200 characters. A force-release needs one.

    Raises:
        InvalidArgument: The actor or the reason breaks a rule.
    """

    operation: Operation
    actor: Any
    reason: str

    def __post_init__(self) -> None:
        if not (is_plain_text(self.reason) and len(self.reason) <= MAX_TEXT):
            raise InvalidArgument(
                f"reason must be a text of at most {MAX_TEXT} characters without NUL and"
                f" surrogates, not {shown(self.reason)}."
            )
        if self.operation is Operation.FORCE_RELEASE and not self.reason.strip():
            raise InvalidArgument("A force-release requires a reason.")
        if not (_is_user(self.actor) or _is_name(self.actor)):
            raise InvalidArgument(
                f"actor must be a user, or a text of 1 to {MAX_TEXT} characters, not"
                f" {shown(self.actor)}."
            )

    @property
    def by(self) -> str:
        """The actor's name."""
        if isinstance(self.actor, str):
            return self.actor
        return (str(self.actor.get_username()) or str(self.actor))[:MAX_TEXT]

    def record(
        self,
        store: BaseLockBackend,
        key: str,
        *,
        fence: int | None = None,
        holder: Holder | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Report by a signal, and in the admin's log, that the operation was done."""
        facts: dict[str, Any] = {
            "alias": store.alias, "key": key, "fence": fence, "holder": holder,
            "actor": self.by, "reason": self.reason,
        }  # fmt: skip
        if self.operation is Operation.FORCE_RELEASE:
            tell(lock_forced, type(store), **facts)
        else:
            facts |= {"operation": self.operation.value, "details": dict(details or {})}
            tell(lock_operated, type(store), **facts)
        named = urlencode({"backend": store.alias, "key": key}) if key else None
        self.keep(repr(store.alias), key=key, named=named, fence=fence)

    def keep(
        self, where: str, *, key: str = "", named: str | None = None, fence: int | None = None
    ) -> None:
        """Write the operation into the admin's log, if there is one and the actor is a user."""
        if not (apps.is_installed("django.contrib.admin") and _is_user(self.actor)):
            return
        from django.contrib.admin.models import CHANGE, DELETION, LogEntry
        from django.contrib.contenttypes.models import ContentType

        model = apps.get_model("django_distlock", "HeldLock")
        gone = self.operation in (Operation.FORCE_RELEASE, Operation.CLEANUP)
        about = f" (fence {fence})" if fence else ""
        why = f": {printable(self.reason)}" if self.reason else ""
        try:
            using = router.db_for_write(LogEntry)
            # Each in a block of its own, so that an error leaves the caller's transaction as it
            # was; and two, because SQLite does not wait for a write that follows a read.
            with transaction.atomic(using=using):
                content_type = ContentType.objects.db_manager(using).get_for_model(model)
            with transaction.atomic(using=using):
                LogEntry.objects.using(using).create(
                    user_id=self.actor.pk,
                    content_type=content_type,
                    object_id=named,
                    object_repr=printable(key)[:200],
                    action_flag=DELETION if gone else CHANGE,
                    change_message=f"{self.operation.value} on {where}{about}{why}",
                )
        except Exception as error:  # noqa: BLE001 - it was done, whatever becomes of the note
            pass_on(error)
            extra = log_fields("admin_log_failed", key=key)
            logger.warning(
                "The action of %s on %r could not be written to the admin log: %s",
                self.by,
                key,
                error,
                extra=extra,
            )


def _is_user(actor: object) -> bool:
    # Not by its class: a request's user is a lazy stand-in, and an anonymous user has no row.
    return getattr(actor, "pk", None) is not None and hasattr(actor, "get_username")


def _is_name(actor: Any) -> bool:
    return is_plain_text(actor) and actor.strip() != "" and len(actor) <= MAX_TEXT
