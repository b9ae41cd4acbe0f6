"""Run the shop's jobs until whoever started this ends."""

import os
import subprocess
import sys
from typing import Any

from django.conf import settings
from django.core.management import BaseCommand

#: What a worker gets to finish what it runs.
PATIENCE_SECONDS = 10


class Command(BaseCommand):
    """A worker of Celery, and a beat in it, whose life is that of a pipe.

    However the process at the other end ends, standard input does then, too.
    """

    help = "Runs a Celery worker and its schedule until standard input ends."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Start the worker, wait, and end it."""
        worker = [
            "-A", "config", "worker", "--beat", "--pool=threads", "--concurrency=2",
            "--loglevel=WARNING", "--without-gossip", "--without-mingle",
        ]  # fmt: skip
        # Celery looks for the project in the current folder only, which may be another one.
        path = os.pathsep.join(
            [str(settings.BASE_DIR), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        # A group of its own: Ctrl-C at the terminal reaches who started us, and they end this.
        with subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "celery", *worker],
            env={**os.environ, "PYTHONPATH": path},
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
