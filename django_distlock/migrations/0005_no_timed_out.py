"""A wait that ended in vain leaves no event: docs/decisions/waits-in-vain-leave-no-event.md."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_distlock", "0004_operators")]

    operations = [
        migrations.AlterField(
            model_name="lockevent",
            name="kind",
            field=models.CharField(
                choices=[
                    ("forced", "forced"),
                    ("lost", "lost"),
                    ("taken_over", "taken over"),
                    ("rejected", "rejected"),
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
