"""Bring every database of the shop up to date."""

from typing import Any

from django.core.management import BaseCommand, CommandError, call_command
from django.db import DatabaseError, connections


class Command(BaseCommand):
    """Migrate one after the other."""

    help = "Applies the migrations of every database in the settings."
    # There is nothing to check before the first migration.
    requires_system_checks: list[str] = []

    def handle(self, *_args: Any, **options: Any) -> None:
        """Migrate, and name the database that fails."""
        for alias, connection in connections.settings.items():
            self.stdout.write(f"Migrating {alias!r}: {connection['NAME']}")
            try:
                call_command(
                    "migrate",
                    database=alias,
                    verbosity=options["verbosity"],
                    stdout=self.stdout,
                )
            except DatabaseError as error:
                raise CommandError(f"The database {alias!r} cannot be used: {error}") from error
