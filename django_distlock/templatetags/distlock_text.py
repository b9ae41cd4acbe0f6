"""Filters that show untrusted text, such as keys and ids of tasks, on a page."""

from __future__ import annotations

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..conf import task_url
from ..core.wording import printable
from ..exceptions import InvalidLockBackend

register = template.Library()


@register.filter(name="printable")
def show(text: str | None) -> str:
    """Return a text with invisible characters escaped; "" for None."""
    return printable(text or "")


@register.filter
def task(task_id: str | None) -> SafeString | str:
    """Return the id of a task, as a link if `DISTLOCK_TASK_URL` is set; "": there is no id."""
    if not task_id:
        return ""
    text = format_html("<bdi>{}</bdi>", printable(task_id))
    try:
        href = task_url(task_id)
    except InvalidLockBackend:
        return text  # Check E001 reports the setting.
    return format_html('<a href="{}">{}</a>', href, text) if href else text
