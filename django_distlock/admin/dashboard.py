"""The dashboard: the locks that are held now, on every backend."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import connections, transaction
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.cache import get_conditional_response
from django.utils.http import quote_etag
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from ..core.errors import BackendUnavailable, LockError
from ..core.wording import printable
from ..handler import lock_backends
from ..inspection import Operation, asking, may, show
from ..models import HeldLock
from .acts import ACTS, Act, CleanupForm, act_on, allowed, another, clean_up, records_over
from .addresses import Pages, Target, object_page
from .filters import FilterForm, KeyForm
from .key_page import KeyPage
from .overview import Overview, problems
from .read_only import ReadOnlyAdmin, may_see_events

#: Keys that one request may act on.
MAX_TARGETS = 100


@admin.register(HeldLock)
class LockDashboard(ReadOnlyAdmin):
    """The locks held on every backend, shown in place of the admin's list of rows."""

    def get_urls(self) -> list[URLPattern]:
        """Add the pages that show a key, operate on keys, and clean up."""
        wrap = self.admin_site.admin_view
        operate, cleanup = wrap(self.operate_view), wrap(self.cleanup_view)
        # What these views do and log stays committed, even if the response fails.
        for using in connections:
            for each in (operate, cleanup):
                transaction.non_atomic_requests(using)(each)
        return [
            path("key/", wrap(self.key_view), name="django_distlock_heldlock_key"),
            path("operate/", operate, name="django_distlock_heldlock_operate"),
            path("cleanup/", cleanup, name="django_distlock_heldlock_cleanup"),
            *super().get_urls(),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the held locks; with `?live`, only the parts that change, or 304 if none has."""
        self._require(request, Operation.VIEW)
        form = FilterForm(request.GET, auto_id="filter-%s")
        pages = Pages.of(self.admin_site, request)
        overview = Overview.of(form, request.GET.get("cursor"), pages)
        acts = allowed(request.user)
        context = {"overview": overview, "acts": acts, "page": request.GET, "pages": pages}
        if "live" not in request.GET:
            context |= {
                **self._context(request, _("Locks")),
                **(extra_context or {}),
                "form": form,
                "open_form": KeyForm(auto_id="open-%s"),
                "may_clean": may(request.user, Operation.CLEANUP),
                "problems": problems(),
                "back": f"?{request.GET.urlencode()}",
            }
            return TemplateResponse(request, "admin/django_distlock/dashboard.html", context)
        offered = [each.operation for each in acts]
        seen = repr((get_language(), offered, pages, overview.facts()))
        tag = quote_etag(hashlib.sha256(seen.encode("utf-8", "surrogatepass")).hexdigest())
        response = get_conditional_response(request, etag=tag)
        if response is None:
            response = TemplateResponse(request, "admin/django_distlock/live.html", context)
        response["ETag"] = tag
        response["Cache-Control"] = "no-cache, private"
        return response

    def change_view(self, request: HttpRequest, object_id: str, *_: Any, **__: Any) -> HttpResponse:
        """Redirect from the history of the admin to the page of a key."""
        self._require(request, Operation.VIEW)
        return redirect(self._pages.key(Target.of(unquote(object_id))))

    def key_view(self, request: HttpRequest) -> HttpResponse:
        """Show all that is known about a key."""
        self._require(request, Operation.VIEW)
        if request.GET.get("backend") == "":
            return self._find(request)
        target = Target.of(request.GET.urlencode())
        context = {
            **self._context(request, printable(target.key)),
            "target": target,
            "object": object_page(target.key, self.admin_site, request),
        }
        sees = may_see_events(self.admin_site, request)
        page = _looked_at(target, self._pages, {}, tells_who=sees)
        if isinstance(page, KeyPage):
            acts = [each for each in allowed(request.user) if page.fits(each.operation)]
            context |= {"page": page, "acts": acts, "chain": page.chain()}
        else:
            context |= {"failure": page}
        status = 503 if "failure" in context else 200
        return TemplateResponse(request, "admin/django_distlock/key.html", context, status=status)

    def _find(self, request: HttpRequest) -> HttpResponse:
        """Redirect to the key if one backend knows it; else show what each backend knows."""
        key = request.GET.get("key", "")
        targets = [Target.of(Target(alias, key).text) for alias in lock_backends]
        if not targets:
            raise Http404
        failures = {alias: each.message for alias, each in asking.silent().items()}
        pages = [
            (each, _looked_at(each, self._pages, failures, tells_who=False)) for each in targets
        ]
        found = [
            (self._pages.key(target), target, page)
            for target, page in pages
            if not (isinstance(page, KeyPage) and page.is_unknown)
        ]
        if len(found) == 1 and isinstance(found[0][2], KeyPage):
            return redirect(found[0][0])
        context = {**self._context(request, printable(key)), "target": targets[0], "found": found}
        return TemplateResponse(request, "admin/django_distlock/found.html", context)

    def operate_view(self, request: HttpRequest) -> HttpResponse:
        """Show what will happen to the chosen keys, and do it after a confirmation."""
        if request.method != "POST":
            return redirect(self._pages.locks)
        wanted = request.POST.get("operation")
        act = next((each for each in ACTS.values() if each.operation == wanted), None)
        if act is None:
            raise Http404
        self._require(request, Operation.VIEW, act.operation)
        targets = _chosen(request, act)
        if len(targets) > MAX_TARGETS:
            raise Http404
        back = self._behind(request, targets)
        if not targets:
            self.message_user(request, _("No key selected. Nothing was changed."), "warning")
            return redirect(back)
        form = act.form(request.POST if "confirmed" in request.POST else None)
        form.fields["reason"].required = act.is_grave
        if form.is_valid():
            act_on(request, act, targets, form.arguments())
            return redirect(back)
        sees = may_see_events(self.admin_site, request)
        context = {
            **self._context(request, str(act.label)),
            "act": act,
            "form": form,
            "keys": list(_chosen_pages(targets, self._pages, tells_who=sees)),
            "back": request.POST.get("back", ""),
            "back_address": back,
        }
        return TemplateResponse(request, "admin/django_distlock/operate.html", context)

    def cleanup_view(self, request: HttpRequest) -> HttpResponse:
        """Show what a cleanup removes, and do it after a confirmation."""
        self._require(request, Operation.VIEW, Operation.CLEANUP)
        form = CleanupForm(request.POST if request.method == "POST" else None)
        if form.is_valid():
            clean_up(request, form)
            return redirect(self._pages.locks)
        context = {
            **self._context(request, _("Clean up")),
            "form": form,
            "over": list(records_over()),
            "back_address": self._pages.locks,
        }
        return TemplateResponse(request, "admin/django_distlock/cleanup.html", context)

    def _require(self, request: HttpRequest, *operations: Operation) -> None:
        is_allowed = all(may(request.user, each) for each in operations)
        # A project may have restricted the permission to view.
        if not (is_allowed and self.has_view_permission(request)):
            raise PermissionDenied

    def _context(self, request: HttpRequest, title: str) -> dict[str, Any]:
        request.current_app = self.admin_site.name
        return {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": title,
            "media": self.media,
        }

    @property
    def _pages(self) -> Pages:
        return Pages(self.admin_site.name)

    def _behind(self, request: HttpRequest, targets: Sequence[Target]) -> str:
        """Return the address of the page that sent the form: a key's page or the dashboard."""
        back = request.POST.get("back", "")
        if back == "key" and len(targets) == 1:
            return self._pages.key(replace(targets[0], fences=()))
        if back.startswith("?"):
            return f"{self._pages.locks}?{QueryDict(back[1:]).urlencode()}".removesuffix("?")
        return self._pages.locks


def _chosen(request: HttpRequest, act: Act) -> list[Target]:
    """Return the keys that a form names, each once, with all of its chosen holders."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for each in map(Target.of, dict.fromkeys(request.POST.getlist("target"))):
        fences = each.fences if act.is_about_holder else ()
        found[each.backend, each.key] = found.get((each.backend, each.key), ()) + fences
    return [Target(*names, fences) for names, fences in found.items()]


def _looked_at(
    target: Target, pages: Pages, silent: dict[str, str], *, tells_who: bool
) -> KeyPage | str:
    """Return the page of a key, or the text of an error if its backend does not answer.

    Args:
        silent: The errors of backends that did not answer. They are not asked again.
    """
    if target.backend not in silent:
        try:
            return KeyPage(show(target.key, target.backend), target, pages, tells_who)
        except BackendUnavailable as error:
            silent[target.backend] = str(error)
        except (LockError, ImproperlyConfigured) as error:
            return f"{printable(target.key)}: {error}"
    return f"{printable(target.key)}: {silent[target.backend]}"


def _chosen_pages(
    targets: Iterable[Target], pages: Pages, *, tells_who: bool
) -> Iterator[KeyPage | str]:
    """Yield the same, and a text, too, if none of the chosen holders has the key any more."""
    silent: dict[str, str] = {}
    for target in targets:
        page = _looked_at(target, pages, silent, tells_who=tells_who)
        is_gone = isinstance(page, KeyPage) and page.all_rows and not page.rows
        yield another(target) if is_gone else page
