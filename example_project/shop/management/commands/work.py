"""Run the shop's jobs until whoever started this ends."""

import subprocess
import sys
from typing import Any

from django.core.management import BaseCommand

#: What a worker gets to finish what it runs.
PATIENCE_SECONDS = 10


class Command(BaseCommand):
    """A worker of Celery, and a beat in it, whose life is that of a pipe.

    However the process at the other end ends, standard input does then, too.
    """

    help = "Runs a Celery worker with its schedule, until the end of standard input."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Start the worker, wait, and end it."""
        worker = [
            "-A", "config", "worker", "--beat", "--pool=threads", "--concurrency=2",
            "--loglevel=WARNING", "--without-gossip", "--without-mingle",
        ]  # fmt: skip
        # A group of its own: Ctrl-C at the terminal reaches who started us, and they end this.
        with subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "celery", *worker],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            try:
                sys.stdin.read()
            finally:
                process.terminate()
                try:
                    process.wait(PATIENCE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
