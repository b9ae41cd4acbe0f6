"""A server that speaks S3: moto's, answering one request after another.

Its own one answers in threads, and looks at a condition before it writes, without a lock. A test
that meets between the two would blame the code under test.

    python -m tests.integration.object_store PORT

ends with its standard input.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen
from typing import Any

from tests.keeper import free_port
from tests.processes import Process


@contextmanager
def object_store() -> Iterator[str]:
    """Run a server of our own; give its address."""
    port = free_port()
    command = [sys.executable, "-u", "-m", __name__, str(port)]
    with Process(
        lambda stdin, stdout: Popen(command, stdin=stdin, stdout=stdout, stderr=stdout)
    ) as server:
        server.wait_for("ready", timeout=60)
        yield f"http://127.0.0.1:{port}"


def client_of(url: str) -> Any:
    """Connect to it. Each request is sent once."""
    import boto3  # type: ignore[import-untyped]
    from botocore.config import Config  # type: ignore[import-untyped]

    session = boto3.session.Session(
        aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
    )
    once = Config(retries={"total_max_attempts": 1})
    return session.client("s3", endpoint_url=url, config=once)


def serve(port: int) -> None:
    """Be the server."""
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", port, app, threaded=False, request_handler=MotoRequestHandler)
    threading.Thread(target=_end_with_input, daemon=True).start()
    print("ready")
    server.serve_forever()


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
