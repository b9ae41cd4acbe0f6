"""Who works in a store, as its server knows them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Session:
    """A session of a store with a transaction that keeps a key from being granted anew.

    Attributes:
        pid: The server's number for it; for locks in memory, this process's.
        application: What it calls itself; "": nothing, or the server does not tell.
        user: Its user in the database.
        client: The address it came from; "": a socket of the server's machine.
        since: When its transaction began, by the store's clock; None: not known.
    """

    pid: int
    application: str = ""
    user: str = ""
    client: str = ""
    since: datetime | None = None
