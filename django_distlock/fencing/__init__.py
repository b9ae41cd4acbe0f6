"""Fencing at the write: whoever comes with an older fence than a row has is refused.

A lease can outlive the attention of its holder: a process stands still, and writes when it wakes up
after the end of its lease. What it writes to is where that is noticed.
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
