"""Fencing at the write: a row refuses a write with an older fence than its own.

A process may stand still, and write after its lease has expired. Only what it writes to can notice
that.
"""

from .fields import FenceField
from .models import FencedModel
from .operations import EnforceFence, RelaxFence
from .querysets import FencedQuerySet
from .rejecting import Fence, Fenced
from .relations import FencedManager

__all__ = [
    "EnforceFence",
    "Fence",
    "FenceField",
    "Fenced",
    "FencedManager",
    "FencedModel",
    "FencedQuerySet",
    "RelaxFence",
]
