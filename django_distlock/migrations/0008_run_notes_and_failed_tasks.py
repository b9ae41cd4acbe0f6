"""Tables of failed tasks, and of finished runs, which were records of the table of locks."""

from datetime import datetime, timedelta
from typing import Any

from django.apps.registry import Apps
from django.db import migrations, models, router
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from django_distlock import vendors
from django_distlock.conf import table
from django_distlock.core.keys import new_token
from django_distlock.fields import InstantField, KeyField, to_microseconds
from django_distlock.sql.operations import CreateInnoDBTables

#: Of the records that were notes, and of the row that says that they have moved of late.
OLD_HOST = "\u2126note"
MOVING = "\u2126moving"
#: Seconds to wait at most for the locks of others.
PATIENCE = 60
BATCH = 1000

MOVE = """
INSERT INTO {notes} (storage_key, fence, until)
SELECT storage_key, fence, free_at FROM {locks} WHERE holder_host = %s AND free_at > %s
"""
# What a worker has written since then stays: it is looked for there, too.
LEAVE = """
DELETE FROM {locks} WHERE holder_host = %s
AND (free_at <= %s OR storage_key IN (SELECT storage_key FROM {notes}))
"""


def move(apps: Apps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Move the notes that are not over, and say for how long others may look where they were."""
    using = schema_editor.connection.alias
    note: Any = apps.get_model("django_distlock", "RunNote")
    if not router.allow_migrate_model(using, note):
        return
    vendor = vendors.of(using)
    quote = schema_editor.quote_name
    names = {"notes": quote(table("notes")), "locks": quote(table("locks"))}
    with vendor.short_transaction(PATIENCE), schema_editor.connection.cursor() as cursor:
        now = vendor.now()
        for statement in (MOVE, LEAVE):
            cursor.execute(statement.format(**names), [OLD_HOST, to_microseconds(now)])
        counters: Any = apps.get_model("django_distlock", "FenceCounter")
        if counters.objects.using(using).exists():
            until = now + timedelta(days=1)
            note.objects.using(using).create(storage_key=MOVING, fence=1, until=until)


def move_back(apps: Apps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Move the notes that are not over back to the table of locks."""
    using = schema_editor.connection.alias
    note: Any = apps.get_model("django_distlock", "RunNote")
    if not router.allow_migrate_model(using, note):
        return
    lock: Any = apps.get_model("django_distlock", "HeldLock")
    vendor = vendors.of(using)
    with vendor.short_transaction(PATIENCE):
        now = vendor.now()
        rows = note.objects.using(using).filter(until__gt=now).exclude(pk=MOVING).order_by("pk")
        last = ""
        while page := list(rows.filter(pk__gt=last)[:BATCH]):
            last = page[-1].pk
            lock.objects.using(using).bulk_create(
                [_as_lock(lock, each, now) for each in page],
                # Where the release that is left wrote it in both places.
                ignore_conflicts=True,
            )


def _as_lock(lock: Any, note: Any, now: datetime) -> Any:
    return lock(
        storage_key=note.pk,
        key=note.pk.partition(f"{OLD_HOST}:")[2] or note.pk,
        token=new_token(),
        fence=note.fence,
        ttl=(note.until - now).total_seconds(),
        acquired_at=now,
        renewed_at=now,
        expires_at=note.until,
        free_at=note.until,
        holder_host=OLD_HOST,
    )


class Migration(migrations.Migration):
    dependencies = [("django_distlock", "0007_secret")]

    operations = [
        CreateInnoDBTables(begin=True),
        migrations.CreateModel(
            name="RunNote",
            fields=[
                (
                    "storage_key",
                    KeyField(
                        max_length=640,
                        primary_key=True,
                        serialize=False,
                        verbose_name="storage key",
                    ),
                ),
                ("fence", models.PositiveBigIntegerField(verbose_name="fence")),
                ("until", InstantField(db_index=True, verbose_name="until")),
            ],
            options={
                "verbose_name": "run note",
                "verbose_name_plural": "run notes",
                "db_table": table("notes"),
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="FailedTask",
            fields=[
                (
                    "task_id",
                    KeyField(
                        max_length=255, primary_key=True, serialize=False, verbose_name="task id"
                    ),
                ),
                ("task", KeyField(max_length=255, verbose_name="task")),
                ("backend", KeyField(max_length=100, verbose_name="backend")),
                ("key", KeyField(blank=True, max_length=512, verbose_name="key")),
                ("failed_at", InstantField(db_index=True, verbose_name="failed at")),
                ("message", models.JSONField(default=dict, verbose_name="message")),
                ("route", models.JSONField(default=dict, verbose_name="route")),
                ("sent_at", InstantField(null=True, verbose_name="sent at")),
                ("sent_as", KeyField(max_length=255, null=True, verbose_name="sent as")),
            ],
            options={
                "verbose_name": "failed task",
                "verbose_name_plural": "failed tasks",
                "db_table": table("failed"),
                "default_permissions": (),
            },
        ),
        CreateInnoDBTables(begin=False),
        # In a transaction of its own where tables are not made in one.
        migrations.RunPython(move, move_back, atomic=False),
    ]
