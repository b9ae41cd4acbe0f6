"""`distlock.W007` and `W008`: what decorators and views of the project declare."""

from __future__ import annotations

import sys
from typing import Any, Final

from django.core import checks

from ..core.declarations import Kind, declarations
from ..core.keys import OWN_MARKER, begins_with_field
from ..views import LockedViewMixin
from .configured import DOCS

#: Checked with their tasks, which are not imported yet, and known by their names.
_CELERY: Final = (Kind.CELERY_LOCK, Kind.CELERY_UNIQUE)


@checks.register("distlock")
def check_templates(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W007: a template begins with a text of its own."""
    return [
        checks.Warning(
            f"The key template {each.key!r} of {getattr(made, '__qualname__', made)} starts with a"
            " field. A value chosen by someone else, such as a file name, could then equal the"
            " key of another lock.",
            hint=f"Start it with a text: 'invoice:{{number}}'. {DOCS}",
            id="distlock.W007",
        )
        for made, each in declarations()
        if each.is_template
        and each.kind not in _CELERY
        and not each.key.startswith(OWN_MARKER)
        and begins_with_field(each.key)
    ]


@checks.register("distlock")
def check_mixins(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W008: strangers take no keys."""
    # Imported by whoever has such a view; it needs an installed `django.contrib.auth`.
    access = getattr(sys.modules.get("django.contrib.auth.mixins"), "AccessMixin", None)
    if access is None:
        return []
    classes = dict.fromkeys(
        getattr(made, "view_class", None) for made, each in declarations() if each.kind is Kind.VIEW
    )
    return [
        checks.Warning(
            f"{view.__module__}.{view.__qualname__} acquires its lock before it authenticates the"
            " client. Anyone can then hold its keys, create fence counters, and learn whether a"
            " key is held.",
            hint=f"Put LoginRequiredMixin and similar mixins before LockedViewMixin. {DOCS}",
            id="distlock.W008",
        )
        for view in classes
        if view is not None and _locks_first(view.__mro__, access)
    ]


def _locks_first(bases: tuple[type, ...], access: type) -> bool:
    if LockedViewMixin not in bases:
        return False
    behind = bases[bases.index(LockedViewMixin) :]
    return any(issubclass(each, access) for each in behind)
