"""The lock's operations as Redis scripts, one file each: atomic, and one round trip.

A script is called by its digest and sent as a whole where the server does not know it: after a
restart, a failover or `SCRIPT FLUSH`.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Script(NamedTuple):
    """A script, and the digest that Redis knows it by."""

    text: str
    digest: str

    @classmethod
    def of(cls, text: str) -> Script:
        """Return a script with its digest."""
        # Not a signature: it is what EVALSHA takes.
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


#: The name that a part of `common.lua` defines.
_NAME = re.compile(r"^local (?:function )?(\w+)", re.MULTILINE)
#: The scripts that a script calls, as functions of keys and arguments.
_CALLS = {"acquire_many": ("acquire", "share")}


@cache
def script(name: str) -> Script:
    """Return the script of an operation, such as `"acquire"`."""
    called = "".join(
        f"local function {each}(KEYS, ARGV)\n{_source(each)}end\n" for each in _CALLS.get(name, ())
    )
    return Script.of(_with_common(f"{called}{_source(name)}"))


def _with_common(source: str) -> str:
    """Add what a script uses of `common.lua`: each call makes these functions again.

    The parts are separated by empty lines, and use only what is above them.
    """
    beginning, *parts = _source("common").split("\n\n")
    for part in reversed(parts):
        (name,) = _NAME.findall(part)
        if re.search(rf"\b{name}\b", source):
            source = f"{part}\n\n{source}"
    return f"{beginning}\n\n{source}"


def _source(name: str) -> str:
    return (files(__package__) / f"{name}.lua").read_text(encoding="utf-8")
