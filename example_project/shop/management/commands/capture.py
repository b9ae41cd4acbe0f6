"""Capture a payment, and let whoever started it answer for the provider."""

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management import BaseCommand, CommandError

from django_distlock import FenceRejected, LockError, distlock
from shop import payments
from shop.models import Payment


class Command(BaseCommand):
    """One of the workers of a story."""

    help = (
        "Captures a payment and prints each step as a line of JSON. The provider's answer is a"
        " line on standard input."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the payment, and how long its lease lives."""
        parser.add_argument("payment", type=int)
        parser.add_argument(
            "--ttl", type=float, help="seconds after the last heartbeat until the lease expires"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        """Capture it, or say why not."""
        pk = options["payment"]
        try:
            with distlock(f"payment:{pk}", ttl=options["ttl"], wait=15) as lease:
                captured = payments.capture(pk, lease, self.ask)
        except FenceRejected as error:
            self.say("refused", error.fence)
        except (LockError, Payment.DoesNotExist) as error:
            raise CommandError(str(error)) from None
        else:
            self.say("captured" if captured else "captured before", lease.fence)

    def ask(self, payment: Payment) -> None:
        """Ask for an answer, for as long as it takes."""
        self.say("asking", payment.fence)
        if not sys.stdin.readline():
            raise CommandError("Nobody is there to answer for the provider.")

    def say(self, step: str, fence: int | None) -> None:
        """Print what was done, and under which fence."""
        self.stdout.write(json.dumps({"step": step, "fence": fence}))
        self.stdout.flush()
