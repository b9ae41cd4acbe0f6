"""Permissions for what operators do, and kinds for the events that it leaves."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_distlock", "0003_seen_fence")]

    operations = [
        migrations.AlterModelOptions(
            name="heldlock",
            options={
                "verbose_name": "held lock",
                "verbose_name_plural": "held locks",
                "default_permissions": ("view",),
                "permissions": (
                    ("force_release_heldlock", "Can take a key from its holder"),
                    ("expire_soon_heldlock", "Can let a lease end sooner"),
                    ("request_stop_heldlock", "Can ask a holder to finish"),
                    ("cleanup_heldlock", "Can remove records of leases that are over"),
                ),
            },
        ),
        migrations.AlterModelOptions(
            name="fencecounter",
            options={
                "verbose_name": "fence counter",
                "verbose_name_plural": "fence counters",
                "base_manager_name": "objects",
                "default_permissions": ("view",),
                "permissions": (
                    ("pause_fencecounter", "Can pause a key"),
                    ("resume_fencecounter", "Can end the pause of a key"),
                ),
            },
        ),
        migrations.AlterField(
            model_name="lockevent",
            name="kind",
            field=models.CharField(
                choices=[
                    ("forced", "forced"),
                    ("lost", "lost"),
                    ("taken_over", "taken over"),
                    ("rejected", "rejected"),
                    ("timed_out", "timed out"),
                    ("shortened", "shortened"),
                    ("stop_requested", "asked to finish"),
                    ("paused", "paused"),
                    ("resumed", "resumed"),
                    ("cleaned", "cleaned up"),
                ],
                max_length=20,
                verbose_name="kind",
            ),
        ),
    ]
