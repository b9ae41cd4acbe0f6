"""What must never be: found once, it is a defect, and no test that finds it is run again."""

from __future__ import annotations


class Unsafe(Exception):
    """Two held a key at once, an update was lost, a fence came again, a task ran twice.

    No assertion, because those are made again where a machine may have stood still. However slow a
    machine is, it makes none of these: that it does not happen the next time proves nothing.
    """


def never(broken: object, what: str) -> None:
    """Fail for good where something is so that must never be.

    Args:
        broken: Whether it is so, or what shows it: nothing, zero and None are well.
        what: What has happened then.

    Raises:
        Unsafe: It is so.
    """
    if broken:
        raise Unsafe(what if broken is True else f"{what}: {broken!r}")
