"""Sell pieces of a product, one after the other."""

import json
import signal
import sys
import time
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management import BaseCommand

from shop.stock import sell_one

#: Between two sales of one process: whoever gives a lock back and asks again at once is the first.
NEXT_CUSTOMER_SECONDS = 0.02


class Command(BaseCommand):
    """One of the processes that compete for the stock."""

    help = "Sells pieces of a product and prints each sale as a line of JSON."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take the product, how often, and whether to lock it."""
        parser.add_argument("product", type=int)
        parser.add_argument("--times", type=int, default=1)
        parser.add_argument("--without-lock", action="store_true")
        parser.add_argument(
            "--wait-for-start", action="store_true", help="wait for a line on standard input"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        """Sell, and leave quietly on Ctrl-C: the block gives the lock back."""
        # Inherited, it may be ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            if options["wait_for_start"]:
                self.stdout.write("ready")
                self.stdout.flush()
                if not sys.stdin.readline():
                    return
            for _ in range(options["times"]):
                sale = sell_one(options["product"], with_lock=not options["without_lock"])
                self.stdout.write(json.dumps(asdict(sale)))
                self.stdout.flush()
                time.sleep(NEXT_CUSTOMER_SECONDS)
        except KeyboardInterrupt:
            return
