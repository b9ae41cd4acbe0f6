"""How pages name a key: by an address, and by the value of a checkbox; and where they are."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlencode

from django.apps import apps
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import quote
from django.http import Http404, HttpRequest
from django.urls import NoReverseMatch, reverse

from ..core.errors import LockError
from ..core.keys import stored_key
from ..core.wording import printable
from ..handler import lock_backends
from ..models import LockEvent


@dataclass(frozen=True, slots=True)
class Target:
    """A key of a backend, and the fences of the holders who were looked at; (): nobody has said."""

    backend: str
    key: str
    fences: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str) -> Target:
        """Read what a form or an address says; `Http404`: it names no legal key, or no backend."""
        pairs = parse_qsl(text, keep_blank_values=True)
        fields = dict(pairs)
        try:
            fences = tuple(int(value) for name, value in pairs if name == "fence")
            found = cls(fields["backend"], stored_key(fields["key"]), fences)
        except (KeyError, ValueError, LockError):
            raise Http404 from None
        if found.backend not in lock_backends:
            raise Http404
        return found

    @property
    def text(self) -> str:
        """What `of` reads: also the query of an address."""
        # A form would change line ends, and a key may have some.
        seen = [("fence", each) for each in self.fences]
        return urlencode([("backend", self.backend), ("key", self.key), *seen])


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the pages are, in a site of the admin; `events` only for who may see them."""

    site: str
    events: str = ""

    @classmethod
    def of(cls, site: AdminSite, request: HttpRequest) -> Pages:
        """Return those of a site that somebody may open."""
        pages = cls(site.name)
        may_see = site.is_registered(LockEvent) and site.get_model_admin(
            LockEvent
        ).has_view_permission(request)
        return replace(pages, events=pages._of("lockevent_changelist")) if may_see else pages

    @property
    def locks(self) -> str:
        """The dashboard."""
        return self._of("heldlock_changelist")

    def key(self, target: Target) -> str:
        """Return the page of a key."""
        return f"{self._of('heldlock_key')}?{target.text}"

    def _of(self, name: str) -> str:
        return reverse(f"admin:django_distlock_{name}", current_app=self.site)


def object_page(key: str, site: AdminSite, request: HttpRequest) -> tuple[str, str] | None:
    """Return the name and the page of the object that a key is about; None: it names none.

    A key names a model at its beginning, and after a colon the primary key: `shop.order:17`. The
    app may be left out where the site has one model of that name.
    """
    name, _, rest = key.partition(":")
    app, _, model_name = name.lower().rpartition(".")
    pk = rest.partition(":")[0]
    found = [
        each
        for each in apps.get_models()
        if each._meta.model_name == model_name
        and app in ("", each._meta.app_label.lower())
        and site.is_registered(each)
    ]
    may_see = len(found) == 1 and site.get_model_admin(found[0]).has_view_permission(request)
    if not (pk and may_see):
        return None
    meta = found[0]._meta
    name = f"admin:{meta.app_label}_{meta.model_name}_change"
    with suppress(NoReverseMatch):  # A project's own admin need not have such a page.
        href = reverse(name, args=[quote(pk)], current_app=site.name)
        return f"{meta.verbose_name} {printable(pk)}", href
    return None
