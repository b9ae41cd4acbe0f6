"""The forms of the dashboard: filters of the list, and the search for a key."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils.translation import gettext_lazy as _

from ..core.errors import LockError
from ..core.keys import stored_key
from ..handler import lock_backends
from ..inspection import State
from ..inspection.summary import SOON
from .dashboard_rows import COLUMNS

#: Choices of the seconds for which a lock has been held at least.
AGES = (
    ("", _("any age")),
    ("60", _("longer than a minute")),
    ("600", _("longer than ten minutes")),
    ("3600", _("longer than an hour")),
    ("86400", _("longer than a day")),
)


def _backends() -> list[tuple[str, Any]]:
    return [("", _("all")), *named_backends()]


#: The part of the ttl that may pass since a renewal; after more, two beats in a row have failed.
LATE = 0.7
#: Filters that are no state but have a number above the list, with the arguments of `list_locks`.
COUNTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "ending_soon": (_("expires within 10 s"), {"ends_within": SOON}),
    "overdue": (_("late heartbeat"), {"overdue": LATE}),
}


def _states() -> list[tuple[str, Any]]:
    return [
        ("", _("any")),
        *((each.value, each.label) for each in State),
        *((name, label) for name, (label, _arguments) in COUNTED.items()),
    ]


def named_backends() -> list[tuple[str, Any]]:
    """Return the backends as choices, without a choice of all of them."""
    return [(alias, alias) for alias in lock_backends]


def _orders() -> list[tuple[str, str]]:
    return [(order, order) for each in COLUMNS for order in each.orders()]


class KeyForm(forms.Form):
    """The search for a key by its name; the key need not be held."""

    key = forms.CharField(label=_("Key"), max_length=512, strip=False)
    backend = forms.ChoiceField(label=_("Backend"), required=False, choices=_backends)


class FilterForm(forms.Form):
    """The filters and the order of the list."""

    backend = forms.ChoiceField(label=_("Backend"), required=False, choices=_backends)
    begins = forms.CharField(
        label=_("Key starts with"), required=False, max_length=512, strip=False
    )
    contains = forms.CharField(label=_("Key contains"), required=False, max_length=512, strip=False)
    state = forms.ChoiceField(label=_("State"), required=False, choices=_states)
    host = forms.CharField(label=_("Host"), required=False, max_length=255)
    task = forms.CharField(label=_("Task id"), required=False, max_length=255)
    age = forms.ChoiceField(label=_("Held for"), required=False, choices=AGES)

    order = forms.ChoiceField(required=False, choices=_orders, widget=forms.HiddenInput)

    def clean_begins(self) -> str:
        """Refuse a text that no key can begin with."""
        text: str = self.cleaned_data["begins"]
        try:
            return stored_key(text) if text else ""
        except LockError as error:
            raise forms.ValidationError(str(error)) from None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `list_locks`, without those of fields with illegal values."""
        self.full_clean()
        given = self.cleaned_data
        state = given.get("state")
        return {
            "backends": [given["backend"]] if given.get("backend") else None,
            "prefix": given.get("begins", ""),
            "contains": given.get("contains", ""),
            "host": given.get("host") or None,
            "task_id": given.get("task") or None,
            "held_longer_than": float(given["age"]) if given.get("age") else None,
            **(
                COUNTED[state][1]
                if state in COUNTED
                else {"states": [State(state)] if state else None}
            ),
        }
