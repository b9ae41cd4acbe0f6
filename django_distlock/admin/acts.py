"""The operations of the admin on keys and records, and the messages about their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from django import forms
from django.contrib import messages
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from .. import inspection
from ..core.errors import BackendUnavailable, LockError
from ..core.wording import printable
from ..handler import lock_backends
from ..inspection import Operation, Outcome, asking
from .addresses import Target
from .filters import named_backends


class ReasonForm(forms.Form):
    """The reason for an operation."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"), max_length=200, required=False,
        widget=forms.TextInput(attrs={"class": "vTextField", "autocomplete": "off"}),
        help_text=gettext_lazy(
            "Recorded with your user name in the lock events and in the admin log."
        ),
    )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the operation."""
        return {"reason": self.cleaned_data["reason"]}


class WithinForm(ReasonForm):
    """The seconds within which a lease expires, and the reason."""

    within = forms.FloatField(
        label=gettext_lazy("Expires within (seconds)"), min_value=0, max_value=604_800, initial=10
    )
    field_order = ("within", "reason")

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "within": self.cleaned_data["within"]}


class PauseForm(ReasonForm):
    """The duration of a pause, and the reason."""

    minutes = forms.FloatField(
        label=gettext_lazy("Duration (minutes)"), min_value=0.1, max_value=527_040, initial=10
    )
    field_order = ("minutes", "reason")

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "until": self.cleaned_data["minutes"] * 60}


@dataclass(frozen=True, slots=True)
class Act:
    """An operation as pages offer it.

    Attributes:
        promise: What will happen, in a sentence or two.
        result: The message about what was done, with the number of keys or holders.
        form: The form to fill in before.
        is_grave: Whether it takes the lock from a holder, which requires a reason.
        is_about_holder: Whether it applies to the holder that the page showed, and to no later one.
    """

    operation: Operation
    label: Promise
    promise: Promise
    result: Any
    form: type[ReasonForm]
    run: Callable[..., Outcome]
    is_grave: bool = False
    is_about_holder: bool = True


ACTS: Final = {
    each.operation: each
    for each in (
        Act(
            Operation.REQUEST_STOP,
            gettext_lazy("Request stop"),
            gettext_lazy(
                "The holder sees the request at its next heartbeat, after a third of its TTL at"
                " the latest. It keeps the lock until its work is done."
            ),
            ngettext_lazy(
                "Stop requested for %(number)d lock.",
                "Stop requested for %(number)d locks.",
                "number",
            ),
            ReasonForm,
            inspection.request_stop,
        ),
        Act(
            Operation.EXPIRE_SOON,
            gettext_lazy("Shorten lease"),
            gettext_lazy(
                "The holder is asked to stop, and cannot renew its lease past that time. The key"
                " becomes free when the holder releases it or its last renewal expires. It never"
                " becomes free before the holder has been able to notice."
            ),
            ngettext_lazy("%(number)d lease shortened.", "%(number)d leases shortened.", "number"),
            WithinForm,
            inspection.expire_soon,
        ),
        Act(
            Operation.FORCE_RELEASE,
            gettext_lazy("Force-release"),
            gettext_lazy(
                "The fence moves first, so that writes with the old fence are refused. Then the"
                " key becomes free. A live holder keeps working without the lock until its next"
                " check. If you can, end its process first."
            ),
            ngettext_lazy(
                "%(number)d lock force-released.", "%(number)d locks force-released.", "number"
            ),
            ReasonForm,
            inspection.force_release,
            is_grave=True,
        ),
        Act(
            Operation.PAUSE,
            gettext_lazy("Pause key"),
            gettext_lazy(
                "Nobody can acquire the key until the pause ends. A current holder keeps its lease."
            ),
            ngettext_lazy("%(number)d key paused.", "%(number)d keys paused.", "number"),
            PauseForm,
            inspection.pause,
            is_about_holder=False,
        ),
        Act(
            Operation.RESUME,
            gettext_lazy("Resume key"),
            gettext_lazy("The key can be acquired again."),
            ngettext_lazy("%(number)d key resumed.", "%(number)d keys resumed.", "number"),
            ReasonForm,
            inspection.resume,
            is_about_holder=False,
        ),
    )
}


def allowed(user: Any) -> list[Act]:
    """Return the operations that a user may perform."""
    return [each for each in ACTS.values() if inspection.may(user, each.operation)]


def act_on(
    request: HttpRequest, act: Act, targets: Sequence[Target], arguments: dict[str, Any]
) -> None:
    """Run an operation on keys, one after the other, and show messages about the results."""
    done = 0
    silent: set[str] = set()
    for target in targets:
        outcomes: list[Outcome] = []
        failed: Exception | None = None
        if target.backend in silent:
            text = _("Not tried for %(key)s: its backend did not answer.")
            messages.error(request, text % {"key": printable(target.key)})
            continue
        for seen in _holders(act, target):
            try:
                outcome = act.run(
                    target.key, backend=target.backend, actor=request.user, **seen, **arguments
                )
                outcomes.append(outcome)
            except (LockError, ImproperlyConfigured) as error:
                failed = error
                # A store that is down does not answer about the next holder or key either.
                if isinstance(error, BackendUnavailable):
                    silent.add(target.backend)
                    break
        if failed is not None:
            text = _("Failed for %(key)s: %(error)s") % {
                "key": printable(target.key),
                "error": failed,
            }
            messages.error(request, text)
        done += sum(each.is_done for each in outcomes)
        if outcomes:
            _tell(request, target, outcomes)
    if done:
        messages.success(request, act.result % {"number": done})


def _holders(act: Act, target: Target) -> list[dict[str, int | None]]:
    """Return the arguments that select each holder: sharers of a key are handled one by one."""
    if not act.is_about_holder:
        return [{}]
    return [{"fence": each} for each in target.fences or (None,)]


def _tell(request: HttpRequest, target: Target, outcomes: Sequence[Outcome]) -> None:
    """Show a message if an operation on one key was not fully done."""
    busy = next((each for each in outcomes if each.is_busy), None)
    done = next((each for each in outcomes if each.is_done), None)
    if done is not None:
        if remaining := _still_held(done):
            messages.warning(request, remaining)
    elif busy is not None:
        messages.warning(request, _busy(busy))
    elif outcomes[-1].held is not None:
        messages.warning(request, another(target))
    else:
        messages.info(
            request,
            _("Nothing was changed: there was nothing to do for %(key)s.")
            % {"key": printable(target.key)},
        )


# The admin capitalises the first letter of a message, so a key must not come first.


def another(target: Target) -> str:
    """Return the message that a key has other holders than those that the page showed."""
    text = _("Nothing was changed: %(key)s has a new holder. Check it and try again.")
    return text % {"key": printable(target.key)}


def _still_held(outcome: Outcome) -> str:
    """Return a message about the sharers that a force-release left; "": none, or unknown."""
    number = 0
    if outcome.operation is Operation.FORCE_RELEASE and outcome.held and outcome.held.shared:
        with suppress(LockError):
            number = len(inspection.show(outcome.key, outcome.backend).sharing)
    text = ngettext(
        "Still held: %(number)d other shares %(key)s.",
        "Still held: %(number)d others share %(key)s.",
        number,
    )
    return text % {"number": number, "key": printable(outcome.key)} if number else ""


def _busy(outcome: Outcome) -> str:
    sessions = ", ".join(str(each.pid) for each in outcome.sessions or ())
    if not sessions:
        text = _("Nothing was changed: a transaction has locked %(key)s. Try again.")
    else:
        text = _(
            "Nothing was changed: a transaction guards %(key)s (session %(sessions)s). Try again"
            " when it has ended."
        )
    return text % {"key": printable(outcome.key), "sessions": sessions}


class CleanupForm(ReasonForm):
    """The backend and the minimum age of the records to remove, and the reason."""

    backend = forms.ChoiceField(label=gettext_lazy("Backend"), choices=named_backends)
    hours = forms.FloatField(
        label=gettext_lazy("Expired for at least (hours)"), min_value=0, max_value=8760, initial=0
    )
    field_order = ("backend", "hours", "reason")

    def arguments(self) -> dict[str, Any]:
        given = self.cleaned_data
        age = given["hours"] * 3600
        return {**super().arguments(), "backend": given["backend"], "older_than": age}


def records_over() -> Iterator[tuple[str, int | None, str]]:
    """Yield each alias with its number of expired records (None: unknown), and an error's text."""
    failures = asking.silent()
    for alias in lock_backends:
        if alias in failures:
            yield alias, None, failures[alias].message
            continue
        try:
            expired = inspection.statistics(alias).counts.expired
        except (LockError, ImproperlyConfigured) as error:
            yield alias, None, str(error)
        else:
            yield alias, None if expired is None else expired.number, ""


def clean_up(request: HttpRequest, form: CleanupForm) -> None:
    """Clean up as a form says, and show how many records were removed."""
    try:
        outcome = inspection.cleanup(actor=request.user, **form.arguments())
    except (LockError, ImproperlyConfigured) as error:
        messages.error(request, _("Cleanup failed: %(error)s") % {"error": error})
        return
    text = ngettext(
        "%(number)d expired record removed.", "%(number)d expired records removed.", outcome.removed
    )
    messages.success(request, text % {"number": outcome.removed})
