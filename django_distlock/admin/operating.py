"""What an operator may do to keys: a page that says what will happen, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django import forms
from django.contrib import messages
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from .. import inspection
from ..core.errors import LockError
from ..core.wording import printable
from ..inspection import Operation, Outcome, Result
from .targets import Target


class ReasonForm(forms.Form):
    """Why it is done."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"), max_length=200, required=False,
        widget=forms.TextInput(attrs={"class": "vTextField", "autocomplete": "off"}),
        help_text=gettext_lazy("Kept with your name in the events and in the admin's log."),
    )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Return what the operation takes."""
        return {"reason": self.cleaned_data["reason"]}


class NeededReasonForm(ReasonForm):
    """Why it is done, which cannot be left out."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.fields["reason"].required = True


class WithinForm(ReasonForm):
    """How soon, and why."""

    within = forms.FloatField(
        label=gettext_lazy("Ends within seconds"), min_value=0, max_value=604_800, initial=10
    )
    field_order = ("within", "reason")

    def arguments(self) -> dict[str, Any]:
        """Return what the operation takes."""
        return {**super().arguments(), "within": self.cleaned_data["within"]}


class PauseForm(ReasonForm):
    """For how long, and why."""

    minutes = forms.FloatField(
        label=gettext_lazy("For minutes"), min_value=0.1, max_value=527_040, initial=10
    )
    field_order = ("minutes", "reason")

    def arguments(self) -> dict[str, Any]:
        """Return what the operation takes."""
        return {**super().arguments(), "until": self.cleaned_data["minutes"] * 60}


@dataclass(frozen=True, slots=True)
class Act:
    """An operation as pages offer it.

    Attributes:
        label: What the button says.
        promise: What will happen, in a sentence or two.
        form: What has to be said before.
        run: The function of `inspection`.
        is_grave: Whether it takes something away.
        is_about_holder: Whether it is for the holder that was looked at, and for no later one.
    """

    operation: Operation
    label: Promise
    promise: Promise
    form: type[ReasonForm]
    run: Callable[..., Outcome]
    is_grave: bool = False
    is_about_holder: bool = True


ACTS: Final = {
    each.operation: each
    for each in (
        Act(
            Operation.REQUEST_STOP,
            gettext_lazy("Ask the holder to finish"),
            gettext_lazy(
                "The holder sees it at its next beat, a third of its ttl from now at most. It"
                " keeps the lock until it is done."
            ),
            ReasonForm,
            inspection.request_stop,
        ),
        Act(
            Operation.EXPIRE_SOON,
            gettext_lazy("Let the lease end soon"),
            gettext_lazy(
                "The holder is asked to finish, and renews the lease no more behind that time. The"
                " key is free when the holder releases it, or when its last renewal is over: never"
                " before the holder must have noticed."
            ),
            WithinForm,
            inspection.expire_soon,
        ),
        Act(
            Operation.FORCE_RELEASE,
            gettext_lazy("Take the key from its holder"),
            gettext_lazy(
                "The fence moves first, so that writes with the old one are refused; then the key"
                " is free. A holder that lives goes on working without the lock until it looks:"
                " end its process first, where you can."
            ),
            NeededReasonForm,
            inspection.force_release,
            is_grave=True,
        ),
        Act(
            Operation.PAUSE,
            gettext_lazy("Pause the key"),
            gettext_lazy("Nobody is granted the key until then. Its holder keeps its lease."),
            PauseForm,
            inspection.pause,
            is_about_holder=False,
        ),
        Act(
            Operation.RESUME,
            gettext_lazy("End the pause of the key"),
            gettext_lazy("The key is granted again."),
            ReasonForm,
            inspection.resume,
            is_about_holder=False,
        ),
    )
}


def allowed(user: Any) -> list[Act]:
    """Return what a user may do."""
    return [each for each in ACTS.values() if inspection.may(user, each.operation)]


def act_on(
    request: HttpRequest, act: Act, targets: Sequence[Target], arguments: dict[str, Any]
) -> None:
    """Do something to keys, one after the other, and tell what became of each."""
    done = 0
    for target in targets:
        try:
            seen = {"fence": target.fence} if act.is_about_holder else {}
            outcome = act.run(
                target.key, backend=target.backend, actor=request.user, **seen, **arguments
            )
        except (LockError, ImproperlyConfigured) as error:
            text = _("Not done to %(key)s: %(error)s") % {
                "key": printable(target.key),
                "error": error,
            }
            messages.error(request, text)
            continue
        done += outcome.is_done
        if outcome.result is Result.BUSY:
            messages.warning(request, _busy(outcome))
        elif outcome.result is Result.NOTHING and outcome.held is not None:
            messages.warning(request, _another(target))
        elif outcome.result is Result.NOTHING:
            messages.info(
                request,
                _("Nothing was changed, there was nothing to do: %(key)s.")
                % {"key": printable(target.key)},
            )
    if done:
        text = ngettext("%(label)s: %(number)d key.", "%(label)s: %(number)d keys.", done)
        messages.success(request, text % {"label": act.label, "number": done})


# The admin begins messages with a capital letter: no key may come first.


def _another(target: Target) -> str:
    text = _("Nothing was changed: somebody else holds %(key)s by now. Look at it again.")
    return text % {"key": printable(target.key)}


def _busy(outcome: Outcome) -> str:
    sessions = ", ".join(str(each.pid) for each in outcome.sessions or ())
    if not sessions:
        text = _("Busy, and nothing was changed: a transaction is in the way of %(key)s.")
    else:
        text = _(
            "Busy, and nothing was changed: %(key)s is guarded by a transaction of session"
            " %(sessions)s."
        )
    return text % {"key": printable(outcome.key), "sessions": sessions}
