"""Text that others wrote, on a page."""

from __future__ import annotations

from django import template

from ..core.wording import printable

register = template.Library()


@register.filter(name="printable")
def show(text: str | None) -> str:
    """Return a text with an escape for each character that cannot be seen; "": there is none."""
    return printable(text or "")
