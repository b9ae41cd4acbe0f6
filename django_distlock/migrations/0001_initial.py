"""Tables of held locks, fence counters and events; on PostgreSQL also functions and a trigger."""

import django.utils.timezone
from django.db import migrations, models

from django_distlock.conf import table
from django_distlock.fields import InstantField, KeyField, NoteField
from django_distlock.sql.operations import CreateInnoDBTables, InstallScripts


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
                        max_length=640,
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
            ],
            options={
                "verbose_name": "held lock",
                "verbose_name_plural": "held locks",
                "db_table": table("locks"),
                "default_permissions": ("view",),
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
            ],
            options={
                "verbose_name": "fence counter",
                "verbose_name_plural": "fence counters",
                "db_table": table("fences"),
                "base_manager_name": "objects",
                "default_permissions": ("view",),
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
                            ("forced", "forced"),
                            ("lost", "lost"),
                            ("taken_over", "taken over"),
                            ("rejected", "rejected"),
                            ("timed_out", "timed out"),
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
            },
        ),
        CreateInnoDBTables(begin=False),
        InstallScripts(),
    ]
