"""Waits for a word, then becomes a program: run as a script, without any package.

A program that runs before its leash knows of it would survive a kill of `distlock_run`. So this
script runs first, with the program's process number, and waits. It ends if `distlock_run` does.
"""

from __future__ import annotations

import os
import signal
import sys


def main(told: str, failed: str, keeps_locale: str, path: str, *command: str) -> None:
    """Wait, and become the program.

    Args:
        told: The descriptor of a pipe that brings a word.
        failed: That of a pipe for the number of the error, if the system cannot run the program.
        keeps_locale: "1": LC_CTYPE is for the program; "0": this Python has set it for itself.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not os.read(int(told), 1):
        return
    os.close(int(told))
    os.set_inheritable(int(failed), False)
    if keeps_locale == "0":
        os.environ.pop("LC_CTYPE", None)
    # Python ignores these signals for itself only.
    for name in ("SIGPIPE", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execve(path, command, os.environ)  # noqa: S606 - what the user asked for
    except OSError as error:
        os.write(int(failed), str(error.errno).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
