"""To remove the records of leases that are over: a page that says how many, and the removal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .. import inspection
from ..core.errors import LockError
from ..handler import lock_backends
from .filters import named_backends
from .operating import ReasonForm


class CleanupForm(ReasonForm):
    """Where, of what age, and why."""

    backend = forms.ChoiceField(label=gettext_lazy("Backend"), choices=named_backends)
    hours = forms.FloatField(
        label=gettext_lazy("Expired for at least (hours)"), min_value=0, max_value=8760, initial=0
    )
    field_order = ("backend", "hours", "reason")

    def arguments(self) -> dict[str, Any]:
        """Return what the operation takes."""
        given = self.cleaned_data
        age = given["hours"] * 3600
        return {**super().arguments(), "backend": given["backend"], "older_than": age}


def records_over() -> Iterator[tuple[str, int | None, str]]:
    """Yield for each backend how many records are of leases that are over, or why nobody knows."""
    for alias in lock_backends:
        try:
            expired = inspection.statistics(alias).counts.expired
        except (LockError, ImproperlyConfigured) as error:
            yield alias, None, str(error)
        else:
            yield alias, None if expired is None else expired.number, ""


def clean_up(request: HttpRequest, form: CleanupForm) -> None:
    """Do what a form says, and tell how many are gone."""
    try:
        outcome = inspection.cleanup(actor=request.user, **form.arguments())
    except (LockError, ImproperlyConfigured) as error:
        messages.error(request, _("Cleanup failed: %(error)s") % {"error": error})
        return
    text = ngettext(
        "%(number)d expired record removed.", "%(number)d expired records removed.", outcome.removed
    )
    messages.success(request, text % {"number": outcome.removed})
