"""`distlock.W007`: templates of which a value makes all of the key."""

from __future__ import annotations

from typing import Any, Final

from django.core import checks

from ..core.keys import OWN_MARKER, begins_with_field
from ..declarations import Kind, declarations
from .configured import DOCS

#: Checked with their tasks, which are not imported yet, and known by their names.
_CELERY: Final = (Kind.CELERY_LOCK, Kind.CELERY_UNIQUE)


@checks.register("distlock")
def check_templates(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W007: a template begins with a text of its own."""
    return [
        checks.Warning(
            f"The key template {each.key!r} of {getattr(made, '__qualname__', made)} begins with a"
            " field: a value that somebody else chooses, a file name, can be the key of another"
            " lock.",
            hint=f"Begin it with a text: 'invoice:{{number}}'. {DOCS}",
            id="distlock.W007",
        )
        for made, each in declarations()
        if each.is_template
        and each.kind not in _CELERY
        and not each.key.startswith(OWN_MARKER)
        and begins_with_field(each.key)
    ]
