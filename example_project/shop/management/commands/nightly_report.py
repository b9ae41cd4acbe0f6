"""Make today's report."""

from typing import Any

from django.core.management import BaseCommand, CommandError
from django.utils import timezone

from django_distlock import LockNotAcquired
from django_distlock.scheduling import Skipped
from shop.reports import make_report


class Command(BaseCommand):
    """Start it on as many machines as you like: one of them makes the report."""

    help = "Creates today's report, once."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Make the report, or say who does."""
        report = make_report(timezone.localdate())
        if isinstance(report, Skipped):
            if not isinstance(report.why, LockNotAcquired):
                raise CommandError(f"Not created: {report.why}")
            holder = report.why.holder
            who = f"process {holder.pid}" if holder else "somebody else"
            self.stdout.write(f"Nothing to do: {who} is creating it or has just created it.")
        elif report is None:
            self.stdout.write("Nothing to do: the report already exists.")
        else:
            self.stdout.write(f"{report}: {report.pieces_in_stock} pieces in stock.")
