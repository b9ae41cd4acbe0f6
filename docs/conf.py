"""Sphinx's settings."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "django-distlock"
author = "The django-distlock authors"
copyright = author  # noqa: A001 (Sphinx's name for it)
version = release = installed_version("django-distlock")

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
# Headings can be linked to by name.
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"django-distlock {release}"
