"""Processes that sell the same product at the same time, and what became of the stock."""

import itertools
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shop.models import Product
from shop.stock import Sale

MANAGE = Path(__file__).parent.parent / "manage.py"

#: No competition takes longer.
LIMIT_SECONDS = 120


class Stuck(Exception):
    """A process failed, or they did not come to an end."""


@dataclass
class Seller:
    """One of the processes, and what it has sold so far."""

    process: subprocess.Popen[str]
    sales: list[Sale] = field(default_factory=list)
    is_ready: bool = False
    has_ended: bool = False


@dataclass
class Competition:
    """Let `workers` processes sell `rounds` pieces each, all of the same product."""

    product: Product
    workers: int
    rounds: int
    with_lock: bool
    sellers: list[Seller] = field(default_factory=list)
    _lines: queue.Queue[tuple[Seller, str]] = field(default_factory=queue.Queue)

    @property
    def sold(self) -> int:
        """How many pieces the processes sold."""
        return sum(len(seller.sales) for seller in self.sellers)

    @property
    def stock_fell_by(self) -> int:
        """By how much the stock went down."""
        return self.product.stock - Product.objects.get(pk=self.product.pk).stock

    @property
    def lost(self) -> int:
        """How many sales left no trace in the stock."""
        return self.sold - self.stock_fell_by

    @property
    def fences(self) -> list[int]:
        """The fences, in the order in which the stock went down."""
        sales = [sale for seller in self.sellers for sale in seller.sales]
        return [sale.fence for sale in sorted(sales, key=lambda sale: -sale.wrote)]

    @property
    def fences_rise(self) -> bool:
        """Whether each sale had a higher fence than the one before."""
        return all(before < after for before, after in itertools.pairwise(self.fences))

    def run(self, on_change: Callable[[], object]) -> None:
        """Run to the end, calling `on_change` at every sale.

        Raises:
            Stuck: A process failed, or two minutes have passed.
        """
        give_up = time.monotonic() + LIMIT_SECONDS
        try:
            for _ in range(self.workers):
                self._start()
            self._read(give_up, on_change, until=lambda seller: seller.is_ready)
            for seller in self.sellers:
                self._send_off(seller)
            self._read(give_up, on_change, until=lambda seller: seller.has_ended)
        finally:
            self._stop()
        if any(seller.process.returncode for seller in self.sellers):
            raise Stuck("A process failed. Its output is above.")

    def _start(self) -> None:
        command = [
            sys.executable, str(MANAGE), "sell", str(self.product.pk),
            "--times", str(self.rounds), "--wait-for-start",
        ]  # fmt: skip
        if not self.with_lock:
            command.append("--without-lock")
        # A session of its own: Ctrl-C reaches this process alone, which then stops the others.
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.sellers.append(Seller(process))
        threading.Thread(target=self._listen, args=(self.sellers[-1],), daemon=True).start()

    def _listen(self, seller: Seller) -> None:
        assert seller.process.stdout  # noqa: S101 - asked for
        with seller.process.stdout as lines:
            for line in lines:
                self._lines.put((seller, line))
        self._lines.put((seller, ""))

    def _read(
        self, give_up: float, on_change: Callable[[], object], until: Callable[[Seller], bool]
    ) -> None:
        while not all(until(seller) or seller.has_ended for seller in self.sellers):
            try:
                seller, line = self._lines.get(timeout=max(0, give_up - time.monotonic()))
            except queue.Empty:
                raise Stuck(f"Not finished after {LIMIT_SECONDS} seconds.") from None
            if not line:
                seller.has_ended = True
            elif line == "ready\n":
                seller.is_ready = True
            else:
                seller.sales.append(Sale(**json.loads(line)))
            on_change()

    def _send_off(self, seller: Seller, line: str = "start\n") -> None:
        # A process that has failed reads nothing any more; its status tells.
        assert seller.process.stdin  # noqa: S101 - asked for
        with suppress(BrokenPipeError), seller.process.stdin as pipe:
            pipe.write(line)

    def _stop(self) -> None:
        for seller in self.sellers:
            if not seller.is_ready:
                # It is still starting, and will find nothing to read.
                self._send_off(seller, "")
            elif not seller.has_ended:
                # As Ctrl-C would: the block under the lock ends and gives it back.
                seller.process.send_signal(signal.SIGINT)
        for seller in self.sellers:
            try:
                seller.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                seller.process.kill()
                seller.process.wait()
