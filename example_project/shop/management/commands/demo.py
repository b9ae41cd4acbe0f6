"""Show what locks and fences are good for, then serve the shop."""

import signal
import socket
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management import BaseCommand, CommandError, call_command
from rich.console import Console
from rich.live import Live
from rich.table import Table

from django_distlock import lock_backends
from shop import story
from shop.competition import MANAGE, Competition, Stuck
from shop.models import Payment, Product

STOCK = 10_000
PRODUCTS = ["Coffee grinder", "Kettle", "Teapot"]
PAYMENTS = {"Ada": "12.50", "Grace": "48.00", "Linus": "7.20", "Radia": "31.90"}
#: Whose payment the terminal tells a story of.
HERO = "Radia"
USER = PASSWORD = "demo"


def between(low: int, high: int) -> Any:
    """Return a type for an argument: an int from `low` to `high`."""

    def parse(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise ArgumentTypeError(f"must be a number from {low} to {high}, not {text!r}")
        return int(text)

    return parse


class Command(BaseCommand):
    """From nothing to a shop that is open, by way of a competition and a story."""

    help = (
        "Migrates, runs processes that compete with and without a lock, pauses a lock holder, and"
        " serves the shop."
    )
    # There is nothing to check before the first migration.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Take how many compete, how long, and where to serve."""
        parser.add_argument(
            "--workers", type=between(2, 32), default=4, help="number of processes (default: 4)"
        )
        parser.add_argument(
            "--rounds",
            type=between(0, 500),
            default=20,
            help="sales per process (default: 20; 0: serve at once)",
        )
        parser.add_argument(
            "--port", type=between(1, 65535), default=8000, help="port of the shop (default: 8000)"
        )
        parser.add_argument("--no-serve", action="store_true", help="do not serve the shop")
        parser.add_argument(
            "--no-worker", action="store_true", help="serve without a Celery worker"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        """Run to the end, or until Ctrl-C."""
        # A shell that starts it in the background has Ctrl-C ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.console = Console(highlight=False)
        if not options["no_serve"]:
            require_free(options["port"])
        try:
            self.set_up()
            if options["rounds"]:
                self.compete(options["workers"], options["rounds"])
                self.tell_story()
        except KeyboardInterrupt:
            self.console.print("\nStopped.")
            return
        if not options["no_serve"]:
            self.serve(options["port"], with_worker=not options["no_worker"])

    def set_up(self) -> None:
        """Make tables, a user, something to sell and payments that are open."""
        call_command("migrate_all", verbosity=0)
        user, _ = get_user_model().objects.get_or_create(
            username=USER, defaults={"is_staff": True, "is_superuser": True}
        )
        user.set_password(PASSWORD)
        user.save()
        for name in PRODUCTS:
            Product.objects.update_or_create(name=name, defaults={"stock": STOCK})
        for customer, amount in PAYMENTS.items():
            Payment.objects.update_or_create(
                customer=customer, defaults={"amount": amount, "status": Payment.Status.OPEN}
            )
        self.raise_fences()

    def raise_fences(self) -> None:
        """Let fences exceed those on the rows, also if `SHOP_LOCKS` chose another store before."""
        store = lock_backends["default"]
        if not store.supports_ttl:
            return  # The fences of a session's locks follow the clock.
        for payment in Payment.objects.filter(fence__gt=0):
            store.raise_fences(payment.fence, key=f"payment:{payment.pk}")

    def compete(self, workers: int, rounds: int) -> None:
        """Sell without the lock, then with it, and compare."""
        self.console.print(
            f"\n{workers} processes sell {rounds} pieces each of the same product. Each reads the"
            " stock,\nwaits for a moment, and writes the stock back, less one.\n"
        )
        for with_lock in (False, True):
            product, _ = Product.objects.update_or_create(
                name=PRODUCTS[0], defaults={"stock": STOCK}
            )
            competition = Competition(product, workers, rounds, with_lock)
            self.watch(competition)
            self.console.print(result(competition))
        if competition.lost or not competition.fences_rise:
            raise CommandError("The lock did not protect the stock. Please report this.")

    def watch(self, competition: Competition) -> None:
        """Run a competition under a table that follows it."""
        try:
            with Live(console=self.console, refresh_per_second=8) as live:
                competition.run(lambda: live.update(table(competition)))
        except Stuck as error:
            raise CommandError(str(error)) from None
        finally:
            if not self.console.is_terminal:
                self.console.print()  # which Live leaves out there

    def tell_story(self) -> None:
        """Pause a worker that holds a lock, and see its write refused."""
        if not story.is_possible():
            self.console.print(
                "Session locks do not expire: a paused worker keeps its key, so no takeover is"
                " shown.\n"
            )
            return
        self.console.print(
            "[bold]Paused, taken over, refused[/]\nTwo workers capture the same payment. Its lock"
            f" expires {story.TTL_SECONDS} seconds\nafter the last heartbeat.\n\n{'time':>6} "
            f" worker  {'fence':>19}"
        )
        payment = Payment.objects.get(customer=HERO)
        told = story.Story(payment.pk, lambda step: self.console.print(line(step)))
        try:
            told.start()
            told.wait()
        finally:
            told.stop()
            told.wait()
        if told.failure:
            raise CommandError(told.failure)
        payment.refresh_from_db()
        self.console.print(f"The payment is {payment.status}, under fence {payment.fence:,}.\n")

    def serve(self, port: int, *, with_worker: bool) -> None:
        """Open the shop on this machine, until Ctrl-C."""
        self.console.print(
            f"The shop is on http://127.0.0.1:{port}/ and its admin on /admin/.\nUser: {USER},"
            f" password: {PASSWORD}. They are public: use them for this demo only.\n"
        )
        with worker() if with_worker else nullcontext():
            call_command("runserver", f"127.0.0.1:{port}", use_reloader=False)


def require_free(port: int) -> None:
    """Look at the port before anything else, as `runserver` will.

    Raises:
        CommandError: It cannot be used.
    """
    with socket.socket() as probe:
        # One that closed a moment ago is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise CommandError(
                f"Port {port} cannot be used: {error.strerror}. Choose another one with --port."
            ) from None


@contextmanager
def worker() -> Iterator[None]:
    """Run a worker for a block."""
    with subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, str(MANAGE), "work"], stdin=subprocess.PIPE, process_group=0
    ) as process:
        try:
            yield
        finally:
            # The end of its input is that of the worker.
            process.communicate()


def table(competition: Competition) -> Table:
    """Return what each process has done so far."""
    made = Table(
        title="With the lock" if competition.with_lock else "Without the lock",
        title_justify="left",
        title_style="bold",
    )
    for heading in ("process", "sold", "last sale", "fence"):
        made.add_column(heading, justify="right", min_width=9)
    for seller in competition.sellers:
        last = seller.sales[-1] if seller.sales else None
        made.add_row(
            str(seller.process.pid),
            str(len(seller.sales)),
            f"{last.read} → {last.wrote}" if last else "",
            f"{last.fence:,}" if last and last.fence else "-",
        )
    return made


def result(competition: Competition) -> str:
    """Return what came out, in a sentence."""
    lost = competition.lost
    colour = "red" if lost else "green"
    said = (
        f"{'With' if competition.with_lock else 'Without'} the lock: {competition.sold} sold,"
        f" the stock fell by {competition.stock_fell_by},"
        f" [bold {colour}]{lost} updates lost[/].\n"
    )
    if competition.with_lock:
        fences = competition.fences
        rise = "rising with each grant" if competition.fences_rise else "out of order"
        said += f"Fences: {fences[0]:,} to {fences[-1]:,}, {rise}.\n"
    return said


def line(step: story.Step) -> str:
    """Return a step of the story as a line."""
    text = f"[bold red]{step.text}[/]" if step.is_refusal else step.text
    return f"{step.at:4.1f} s  {step.worker:6}  {step.fence:>19,}  {text}"
