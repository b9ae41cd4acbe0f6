"""A table of waiters; on PostgreSQL also functions that call out keys that somebody waits for."""

from django.db import migrations, models

from django_distlock.conf import table
from django_distlock.fields import InstantField, KeyField
from django_distlock.sql.operations import CreateInnoDBTables, InstallScripts


class Migration(migrations.Migration):
    dependencies = [("django_distlock", "0001_initial")]

    operations = [
        CreateInnoDBTables(begin=True),
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
        CreateInnoDBTables(begin=False),
        # Beside those that workers of the release before call.
        InstallScripts(functions_only=True),
    ]
