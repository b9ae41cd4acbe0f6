"""Make today's report."""

from typing import Any

from django.core.management import BaseCommand
from django.utils import timezone

from django_distlock import LockNotAcquired
from shop.reports import make_report


class Command(BaseCommand):
    """Start it on as many machines as you like: one of them makes the report."""

    help = "Makes today's report, once."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Make the report, or say who does."""
        try:
            report = make_report(timezone.localdate())
        except LockNotAcquired as error:
            who = f"process {error.holder.pid}" if error.holder else "somebody else"
            self.stdout.write(f"Nothing to do: {who} is making it.")
            return
        if report is None:
            self.stdout.write("Nothing to do: it was made before.")
        else:
            self.stdout.write(f"{report}: {report.pieces_in_stock} pieces in stock.")
