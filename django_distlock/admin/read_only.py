"""Read-only admin pages of the tables: nothing is added, changed or deleted here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db import models, router
from django.http import HttpRequest
from django.utils import formats, timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..backends.base import BaseLockBackend
from ..checks.configured import configured
from ..core.errors import LockError
from ..core.keys import stored_key
from ..core.metadata import is_plain_text
from ..core.wording import printable
from ..handler import lock_backends
from ..models import FenceCounter, HeldLock, LockEvent
from .addresses import Pages, Target

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin


def _column(
    description: Any, show: Callable[[Any], str], ordering: str | None = None
) -> Callable[[Any, Any], str]:
    """Return a column for a list and for the page of a row."""

    @admin.display(description=description, ordering=ordering)
    def column(_admin: Any, row: Any) -> str:
        return show(row)

    return column


class ReadOnlyAdmin(_ModelAdmin):
    """A read-only list of rows, from the database that has the locks."""

    actions = None
    show_full_result_count = False
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest, *_: Any, **__: Any) -> bool:
        """Return False: nobody adds, changes or deletes rows by hand."""
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        return super().get_queryset(request).using(self.database())

    def database(self) -> str:
        """Return the alias of the database that is read."""
        return router.db_for_read(self.model)

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> models.Model | None:
        """Return a row; None, too, for an id that no database can store."""
        if not is_plain_text(object_id):
            return None
        found: models.Model | None = super().get_object(request, object_id, from_field)
        return found

    def get_search_results(
        self, request: HttpRequest, queryset: models.QuerySet[Any], search_term: str
    ) -> tuple[models.QuerySet[Any], bool]:
        """Find keys by their beginning, which may contain spaces."""
        try:
            begins = stored_key(search_term) if search_term else ""
        except LockError:
            return queryset.none(), False  # No key begins with it.
        return queryset.filter(key__startswith=begins), False

    plain_fence = _column(
        _("fence"), lambda row: "-" if row.fence is None else str(row.fence), "fence"
    )


@admin.register(FenceCounter)
class FenceCounterAdmin(ReadOnlyAdmin):
    """The last fence of each key, and its pause."""

    list_display = ("plain_key", "plain_fence", "paused", "by")
    search_fields = ("key",)
    search_help_text = _("Search by the start of the key")
    ordering = ("storage_key",)
    fields = ("plain_key", "stored_as", "plain_fence", "paused", "by")
    readonly_fields = ("plain_key", "stored_as", "plain_fence", "paused", "by")

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        return self._for_user(request, super().get_list_display(request))

    def get_fields(self, request: HttpRequest, obj: models.Model | None = None) -> list[Any]:
        return self._for_user(request, super().get_fields(request, obj))

    def _for_user(self, request: HttpRequest, names: Iterable[Any]) -> list[Any]:
        return [each for each in names if each != "by" or may_see_events(self.admin_site, request)]

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Allow filters by who paused a key only to users who may see that."""
        is_about_who = lookup.startswith("paused_by")
        allowed: bool = super().lookup_allowed(lookup, value, request)
        return allowed and (not is_about_who or may_see_events(self.admin_site, request))

    plain_key = _column(_("key"), lambda counter: printable(counter.key), "key")
    stored_as = _column(_("storage key"), lambda counter: printable(counter.storage_key))
    by = _column(_("paused by"), lambda counter: printable(counter.paused_by or "-"), "paused_by")
    paused = _column(_("paused until"), lambda each: _moment(each.paused_until), "paused_until")

    def database(self) -> str:
        """Return the database of the locks, even if no router names it."""
        routed = super().database()
        locks = [each.using for each in configured(BaseLockBackend) if each.using]
        return routed if routed in locks or not locks else locks[0]


@admin.register(LockEvent)
class LockEventAdmin(ReadOnlyAdmin):
    """The lock events, with filters by day and by kind."""

    list_display = ("moment", "kind", "key_page", "backend", "plain_fence", "by", "why")
    list_display_links = ("moment",)
    # No `date_hierarchy`: MySQL may lack the tables of time zones that it needs.
    list_filter = ("kind", "at")
    search_fields = ("key",)
    search_help_text = _("Search by the start of the key")
    ordering = ("-at", "-pk")
    fields = (
        "moment", "kind", "key_page", "backend", "plain_fence", "by", "why", "held_by", "more",
    )  # fmt: skip
    readonly_fields = ("moment", "key_page", "plain_fence", "by", "why", "held_by", "more")

    moment = _column(_("at"), lambda event: _moment(event.at), "at")
    by = _column(_("actor"), lambda event: printable(event.actor), "actor")
    why = _column(_("reason"), lambda event: printable(event.reason), "reason")
    held_by = _column(_("holder"), lambda event: _as_text(event.holder))
    more = _column(_("details"), lambda event: _as_text(event.details))

    @admin.display(description=_("key"), ordering="key")
    def key_page(self, event: LockEvent) -> str:
        """Return a key, as a link to its page if its backend is still configured."""
        key: str = event.key
        has_page = event.backend in lock_backends and self.admin_site.is_registered(HeldLock)
        if not key or not has_page:
            return printable(key)
        href = Pages(self.admin_site.name).key(Target(event.backend, key))
        return format_html('<a href="{}"><bdi>{}</bdi></a>', href, printable(key))


def may_see_events(site: admin.AdminSite, request: HttpRequest) -> bool:
    """Whether the user may see the names of operators and their reasons."""
    if not request.user.has_perm("django_distlock.view_lockevent"):
        return False
    # A project may have restricted the permission to view.
    is_open = not site.is_registered(LockEvent)
    return is_open or site.get_model_admin(LockEvent).has_view_permission(request)


def _moment(instant: datetime | None) -> str:
    if instant is None:
        return "-"
    local = timezone.localtime(instant)
    return f"{formats.date_format(local, 'SHORT_DATE_FORMAT')} {local:%H:%M:%S}"


def _as_text(value: Any) -> SafeString:
    lines = json.dumps(value, indent=2, ensure_ascii=False).split("\n")
    return format_html("<pre>{}</pre>", "\n".join(map(printable, lines)))
