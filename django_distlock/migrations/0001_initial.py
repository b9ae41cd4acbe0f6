"""All tables; on PostgreSQL also the functions and a trigger."""

import django.utils.timezone
from django.db import migrations, models

from django_distlock.conf import index_name, table
from django_distlock.database.fields import InstantField, KeyField, NoteField
from django_distlock.database.sql.operations import CreateInnoDBTables, InstallScripts


class Migration(migrations.Migration):
    initial = True

    # The names of tables come from DISTLOCK_TABLES here as in the models, so that
    # `makemigrations --check` finds nothing to do with any names.
    operations = [
        CreateInnoDBTables(begin=True),
        migrations.CreateModel(
            name="HeldLock",
            fields=[
                (
                    "storage_key",
                    KeyField(
                        max_length=665,
                        primary_key=True,
                        serialize=False,
                        verbose_name="storage key",
                    ),
                ),
                ("key", KeyField(max_length=512, verbose_name="key")),
                ("token", KeyField(max_length=22, unique=True, verbose_name="token")),
                ("fence", models.PositiveBigIntegerField(verbose_name="fence")),
                ("ttl", models.FloatField(null=True, verbose_name="ttl")),
                ("acquired_at", InstantField(verbose_name="acquired at")),
                ("renewed_at", InstantField(verbose_name="renewed at")),
                ("expires_at", InstantField(null=True, verbose_name="expires at")),
                ("free_at", InstantField(null=True, verbose_name="free at")),
                ("wanted", models.BooleanField(default=False, verbose_name="wanted")),
                ("holder", models.JSONField(default=dict, verbose_name="holder")),
                ("holder_host", KeyField(max_length=255, verbose_name="host")),
                (
                    "task_id",
                    KeyField(db_index=True, max_length=255, null=True, verbose_name="task id"),
                ),
                ("stop_requested_at", InstantField(null=True, verbose_name="stop requested at")),
                ("renewed_until", InstantField(null=True, verbose_name="renewed until")),
            ],
            options={
                "verbose_name": "held lock",
                "verbose_name_plural": "held locks",
                "db_table": table("locks"),
                "default_permissions": ("view",),
                "permissions": (
                    ("force_release_heldlock", "Can force-release a lock"),
                    ("expire_soon_heldlock", "Can shorten a lease"),
                    ("request_stop_heldlock", "Can request a stop"),
                    ("cleanup_heldlock", "Can remove expired records"),
                ),
            },
        ),
        migrations.CreateModel(
            name="FenceCounter",
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
                ("key", KeyField(max_length=512, verbose_name="key")),
                ("fence", models.PositiveBigIntegerField(verbose_name="fence")),
                ("paused_until", InstantField(null=True, verbose_name="paused until")),
                (
                    "paused_by",
                    KeyField(max_length=200, null=True, verbose_name="paused by"),
                ),
                ("closed_until", InstantField(null=True, verbose_name="closed until")),
            ],
            options={
                "verbose_name": "fence counter",
                "verbose_name_plural": "fence counters",
                "db_table": table("fences"),
                "base_manager_name": "objects",
                "default_permissions": ("view",),
                "permissions": (
                    ("pause_fencecounter", "Can pause a key"),
                    ("resume_fencecounter", "Can resume a key"),
                ),
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(fence__lte=900_000_000_000_000),
                        name=f"{table('fences')}_max",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="LockEvent",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "at",
                    models.DateTimeField(
                        db_index=True, default=django.utils.timezone.now, verbose_name="at"
                    ),
                ),
                ("backend", KeyField(max_length=100, verbose_name="backend")),
                ("key", KeyField(max_length=512, verbose_name="key")),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("forced", "force-released"),
                            ("lost", "lost"),
                            ("taken_over", "taken over"),
                            ("rejected", "rejected"),
                            ("shortened", "shortened"),
                            ("stop_requested", "stop requested"),
                            ("paused", "paused"),
                            ("resumed", "resumed"),
                            ("cleaned", "cleaned up"),
                            ("released", "released"),
                        ],
                        max_length=20,
                        verbose_name="kind",
                    ),
                ),
                ("fence", models.PositiveBigIntegerField(null=True, verbose_name="fence")),
                ("holder", models.JSONField(default=dict, verbose_name="holder")),
                ("actor", KeyField(blank=True, max_length=200, verbose_name="actor")),
                ("reason", NoteField(blank=True, verbose_name="reason")),
                ("details", models.JSONField(default=dict, verbose_name="details")),
            ],
            options={
                "verbose_name": "lock event",
                "verbose_name_plural": "lock events",
                "db_table": table("events"),
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["key", "kind", "at"], name=index_name("events", "key")),
                    models.Index(fields=["kind", "at"], name=index_name("events", "kind")),
                ],
            },
        ),
        migrations.CreateModel(
            name="Waiter",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "storage_key",
                    KeyField(db_index=True, max_length=640, verbose_name="storage key"),
                ),
                ("holder", models.JSONField(default=dict, verbose_name="holder")),
                ("since", InstantField(verbose_name="since")),
                ("until", InstantField(verbose_name="until")),
                ("channel", KeyField(blank=True, max_length=63, verbose_name="channel")),
            ],
            options={
                "verbose_name": "waiter",
                "verbose_name_plural": "waiters",
                "db_table": table("waiters"),
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="SeenFence",
            fields=[
                (
                    "key",
                    KeyField(max_length=512, primary_key=True, serialize=False, verbose_name="key"),
                ),
                ("fence", models.PositiveBigIntegerField(verbose_name="fence")),
                ("raised_at", InstantField(verbose_name="raised at")),
            ],
            options={
                "verbose_name": "seen fence",
                "verbose_name_plural": "seen fences",
                "db_table": table("seen"),
                "default_permissions": ("view",),
            },
        ),
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
        migrations.CreateModel(
            name="StoredResponse",
            fields=[
                (
                    "name",
                    KeyField(max_length=64, primary_key=True, serialize=False, verbose_name="name"),
                ),
                ("request", KeyField(max_length=64, verbose_name="request")),
                ("status", models.PositiveSmallIntegerField(verbose_name="status")),
                ("headers", models.JSONField(default=dict, verbose_name="headers")),
                ("body", models.BinaryField(default=b"", verbose_name="body")),
                ("made_at", InstantField(verbose_name="made at")),
                ("until", InstantField(db_index=True, verbose_name="until")),
            ],
            options={
                "verbose_name": "stored response",
                "verbose_name_plural": "stored responses",
                "db_table": table("responses"),
                "default_permissions": (),
            },
        ),
        CreateInnoDBTables(begin=False),
        InstallScripts(),
    ]
