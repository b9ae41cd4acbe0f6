"""Where the documentation is read: hints, alert rules and the package's front page lead there."""

from __future__ import annotations

from typing import Final

#: The documentation of the newest release. `alerts.yml` and `pyproject.toml` repeat it.
DOCS_URL: Final = "https://django-distlock.readthedocs.io/en/stable/"


def page(name: str) -> str:
    """Return the address of a page, such as "howto/production"."""
    return f"{DOCS_URL}{name}.html"
