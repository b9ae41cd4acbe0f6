"""Text that others wrote, on a page."""

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
    """Return a text with an escape for each character that cannot be seen; "": there is none."""
    return printable(text or "")


@register.filter
def task(task_id: str | None) -> SafeString | str:
    """Return the id of a task, as a link where `DISTLOCK_TASK_URL` is set; "": there is none."""
    if not task_id:
        return ""
    text = format_html("<bdi>{}</bdi>", printable(task_id))
    try:
        href = task_url(task_id)
    except InvalidLockBackend:
        return text  # As check E001 tells.
    return format_html('<a href="{}">{}</a>', href, text) if href else text
