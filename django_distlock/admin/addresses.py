"""The addresses of pages, and the text that names a key in an address or a checkbox."""

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
    """A key of a backend, and the fences of the holders that the page showed; (): not given."""

    backend: str
    key: str
    fences: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str) -> Target:
        """Parse the text of a form or address; `Http404`: it names no legal key, or no backend."""
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
        """The text that `of` parses, which is also the query of an address."""
        # Encoded, because a form changes line ends, which a key may contain.
        seen = [("fence", each) for each in self.fences]
        return urlencode([("backend", self.backend), ("key", self.key), *seen])


@dataclass(frozen=True, slots=True)
class Pages:
    """The addresses of the pages in an admin site; `events` is "" if the user may not see them."""

    site: str
    events: str = ""

    @classmethod
    def of(cls, site: AdminSite, request: HttpRequest) -> Pages:
        """Return the pages of a site that the user of a request may open."""
        pages = cls(site.name)
        may_see = site.is_registered(LockEvent) and site.get_model_admin(
            LockEvent
        ).has_view_permission(request)
        return replace(pages, events=pages._of("lockevent_changelist")) if may_see else pages

    @property
    def locks(self) -> str:
        """The address of the dashboard."""
        return self._of("heldlock_changelist")

    def key(self, target: Target) -> str:
        """Return the address of a key's page."""
        return f"{self._of('heldlock_key')}?{target.text}"

    def _of(self, name: str) -> str:
        return reverse(f"admin:django_distlock_{name}", current_app=self.site)


def object_page(key: str, site: AdminSite, request: HttpRequest) -> tuple[str, str] | None:
    """Return the name and the page of the object that a key names; None: none, or not allowed.

    A key begins with the model, a colon and the primary key: `shop.order:17`. The app may be left
    out if the site has one model of that name.
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
