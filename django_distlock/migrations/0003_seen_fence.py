"""A table of the highest fences that requests of other services came with."""

from django.db import migrations, models

from django_distlock.conf import table
from django_distlock.fields import InstantField, KeyField
from django_distlock.sql.operations import CreateInnoDBTables


class Migration(migrations.Migration):
    dependencies = [("django_distlock", "0002_waiter")]

    operations = [
        CreateInnoDBTables(begin=True),
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
        CreateInnoDBTables(begin=False),
    ]
