"""The tables: locks, fence counters, which are never deleted, waiters, notes and events."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, NoReturn

from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from . import conf
from .core.keys import PLACE_BYTES, is_place
from .core.records import FENCE_MAX, Record, Waiting, known_holder
from .core.wording import printable
from .database.fields import EventTimeField, InstantField, KeyField, NoteField
from .managers.fence import FenceCounterManager, refuse_change
from .managers.lock import HeldLockManager
from .managers.waiter import WaiterManager

#: Bytes of the longest storage key: any key of 512 bytes after a prefix of 127 or less.
MAX_STORAGE_KEY = 640


class HeldLock(models.Model):
    """A lock that is held, or that has expired without a release. A release deletes the row.

    Only `HeldLockManager` and the server functions write it.
    """

    #: For a lease that shares its key, its `place_name`.
    storage_key = KeyField(
        _("storage key"), primary_key=True, max_length=MAX_STORAGE_KEY + PLACE_BYTES
    )
    key = KeyField(_("key"), max_length=512)
    token = KeyField(_("token"), unique=True, max_length=22)
    fence = models.PositiveBigIntegerField(_("fence"))
    #: Seconds that the last grant or extension gave; null: no expiry.
    ttl = models.FloatField(_("ttl"), null=True)
    acquired_at = InstantField(_("acquired at"))
    renewed_at = InstantField(_("renewed at"))
    expires_at = InstantField(_("expires at"), null=True)
    #: When others may acquire the key: the grace later.
    free_at = InstantField(_("free at"), null=True)
    #: Whether a waiter sleeps until this grant ends.
    wanted = models.BooleanField(_("wanted"), default=False)
    holder = models.JSONField(_("holder"), default=dict)
    holder_host = KeyField(_("host"), max_length=255)
    task_id = KeyField(_("task id"), max_length=255, null=True, db_index=True)
    stop_requested_at = InstantField(_("stop requested at"), null=True)
    #: Until when the lease can be renewed; null: nobody has shortened it.
    renewed_until = InstantField(_("renewed until"), null=True)

    objects: ClassVar[HeldLockManager] = HeldLockManager()

    class Meta:
        db_table = conf.table("locks")
        default_permissions = ("view",)
        # `inspection.Operation` has the operations that require these permissions.
        permissions = (
            ("force_release_heldlock", "Can force-release a lock"),
            ("expire_soon_heldlock", "Can shorten a lease"),
            ("request_stop_heldlock", "Can request a stop"),
            ("cleanup_heldlock", "Can remove expired records"),
        )
        verbose_name = _("held lock")
        verbose_name_plural = _("held locks")

    def __str__(self) -> str:
        return printable(self.key)

    def is_live(self, now: datetime) -> bool:
        """Whether the key is not free yet."""
        return self.free_at is None or now < self.free_at

    def as_record(self) -> Record:
        """Return the row as the value that backends answer with."""
        return Record(
            key=self.key,
            token=self.token,
            fence=self.fence,
            ttl=self.ttl,
            acquired_at=self.acquired_at,
            renewed_at=self.renewed_at,
            expires_at=self.expires_at,
            free_at=self.free_at,
            holder=known_holder(self.holder),
            wanted=self.wanted,
            stop_requested_at=self.stop_requested_at,
            shared=is_place(self.storage_key),
            renewed_until=self.renewed_until,
        )


class FenceCounter(models.Model):
    """The last fence of a key. It is never deleted or lowered, because the next grant counts on.

    On PostgreSQL, a trigger also refuses both.
    """

    storage_key = KeyField(_("storage key"), primary_key=True, max_length=MAX_STORAGE_KEY)
    key = KeyField(_("key"), max_length=512)
    fence = models.PositiveBigIntegerField(_("fence"))
    paused_until = InstantField(_("paused until"), null=True)
    paused_by = KeyField(_("paused by"), max_length=200, null=True)
    #: Until when nobody is granted the key shared, for a waiter to hold it alone; null: it is not
    #: shared.
    closed_until = InstantField(_("closed until"), null=True)

    objects: ClassVar[FenceCounterManager] = FenceCounterManager()

    class Meta:
        db_table = conf.table("fences")
        # Django's own deletions use this manager, and must be refused, too.
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions = (
            ("pause_fencecounter", "Can pause a key"),
            ("resume_fencecounter", "Can resume a key"),
        )
        verbose_name = _("fence counter")
        verbose_name_plural = _("fence counters")
        constraints = (
            models.CheckConstraint(
                condition=models.Q(fence__lte=FENCE_MAX),
                # With the table's name, because some databases require unique names in a schema.
                name=f"{conf.table('fences')}_max",
            ),
        )

    def __str__(self) -> str:
        return f"{printable(self.key)}: {self.fence}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if not self._state.adding:
            refuse_change("saved")
        super().save(*args, **{**kwargs, "force_insert": True})

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_change("deleted")


class Waiter(models.Model):
    """A waiter for a key, for people to see: no decision depends on the row.

    `WaiterManager` writes it, once the wait takes long enough to be of interest.
    """

    storage_key = KeyField(_("storage key"), max_length=MAX_STORAGE_KEY, db_index=True)
    holder = models.JSONField(_("holder"), default=dict)
    since = InstantField(_("since"))
    #: When the row expires if its waiter has died.
    until = InstantField(_("until"))
    #: The channel on which the waiter hears wake-ups; "": none, it polls.
    channel = KeyField(_("channel"), max_length=63, blank=True)

    objects: ClassVar[WaiterManager] = WaiterManager()

    class Meta:
        db_table = conf.table("waiters")
        default_permissions = ("view",)
        verbose_name = _("waiter")
        verbose_name_plural = _("waiters")

    def __str__(self) -> str:
        return printable(self.storage_key)

    def as_waiting(self) -> Waiting:
        """Return the row as the value that backends answer with."""
        # Some databases store "" as null.
        woken = bool(self.channel)
        return Waiting(known_holder(self.holder), self.since, self.until, woken)


class RunNote(models.Model):
    """A note that something was done, such as a run of a task that must not run again.

    Only the backends write it, and remove it after `until`.
    """

    storage_key = KeyField(_("storage key"), primary_key=True, max_length=MAX_STORAGE_KEY)
    fence = models.PositiveBigIntegerField(_("fence"))
    until = InstantField(_("until"), db_index=True)

    class Meta:
        db_table = conf.table("notes")
        default_permissions = ()
        verbose_name = _("run note")
        verbose_name_plural = _("run notes")

    def __str__(self) -> str:
        return printable(self.storage_key)


class FailedTask(models.Model):
    """A task that failed because its lock store was unavailable, to be sent again.

    Only `contrib.celery.failed` writes it.
    """

    task_id = KeyField(_("task id"), primary_key=True, max_length=255)
    task = KeyField(_("task"), max_length=255)
    backend = KeyField(_("backend"), max_length=100)
    key = KeyField(_("key"), max_length=512, blank=True)
    failed_at = InstantField(_("failed at"), db_index=True)
    #: The arguments, in the format of the task's messages; {}: they could not be kept.
    message = models.JSONField(_("message"), default=dict)
    route = models.JSONField(_("route"), default=dict)
    sent_at = InstantField(_("sent at"), null=True)
    sent_as = KeyField(_("sent as"), max_length=255, null=True)

    class Meta:
        db_table = conf.table("failed")
        default_permissions = ()
        verbose_name = _("failed task")
        verbose_name_plural = _("failed tasks")

    def __str__(self) -> str:
        return f"{printable(self.task)} {printable(self.task_id)}"


class StoredResponse(models.Model):
    """The response to a request, for a client that sends the request again.

    Only `idempotency` writes it.
    """

    #: A hash of the host, the view, the key's owner and the key.
    name = KeyField(_("name"), primary_key=True, max_length=64)
    #: A hash of the request's content.
    request = KeyField(_("request"), max_length=64)
    #: 0 until the view has answered. Only READ UNCOMMITTED shows it to other transactions.
    status = models.PositiveSmallIntegerField(_("status"))
    headers = models.JSONField(_("headers"), default=dict)
    body = models.BinaryField(_("body"), default=b"")
    made_at = InstantField(_("made at"))
    until = InstantField(_("until"), db_index=True)

    class Meta:
        db_table = conf.table("responses")
        default_permissions = ()
        verbose_name = _("stored response")
        verbose_name_plural = _("stored responses")

    def __str__(self) -> str:
        return f"{self.status} {self.name}"


class LockEvent(models.Model):
    """An event that operators may need later; of releases, the part that `DISTLOCK_HISTORY` sets.

    The details of a release are `held_for` and `waited`, in seconds.
    """

    class Kind(models.TextChoices):
        """What happened."""

        FORCED = "forced", _("force-released")
        LOST = "lost", _("lost")
        TAKEN_OVER = "taken_over", _("taken over")
        REJECTED = "rejected", _("rejected")
        SHORTENED = "shortened", _("shortened")
        STOP_REQUESTED = "stop_requested", _("stop requested")
        PAUSED = "paused", _("paused")
        RESUMED = "resumed", _("resumed")
        CLEANED = "cleaned", _("cleaned up")
        RELEASED = "released", _("released")

    at = EventTimeField(_("at"), db_index=True, default=timezone.now)
    backend = KeyField(_("backend"), max_length=100)
    key = KeyField(_("key"), max_length=512)
    kind = models.CharField(_("kind"), max_length=20, choices=Kind)
    fence = models.PositiveBigIntegerField(_("fence"), null=True)
    holder = models.JSONField(_("holder"), default=dict)
    actor = KeyField(_("actor"), max_length=200, blank=True)
    reason = NoteField(_("reason"), blank=True)
    details = models.JSONField(_("details"), default=dict)

    class Meta:
        db_table = conf.table("events")
        default_permissions = ("view",)
        indexes = (
            # There may be many releases: queries skip or find them without reading them.
            models.Index(fields=["key", "kind", "at"], name=conf.index_name("events", "key")),
            models.Index(fields=["kind", "at"], name=conf.index_name("events", "kind")),
        )
        verbose_name = _("lock event")
        verbose_name_plural = _("lock events")

    def __str__(self) -> str:
        return f"{self.kind} {printable(self.key)}"


class SeenFence(models.Model):
    """The highest fence in requests of other services, for each key.

    Only `django_distlock.fencing.seen` writes it, and never deletes a row.
    """

    key = KeyField(_("key"), primary_key=True, max_length=512)
    fence = models.PositiveBigIntegerField(_("fence"))
    raised_at = InstantField(_("raised at"))

    class Meta:
        db_table = conf.table("seen")
        default_permissions = ("view",)
        verbose_name = _("seen fence")
        verbose_name_plural = _("seen fences")

    def __str__(self) -> str:
        return f"{printable(self.key)}: {self.fence}"
