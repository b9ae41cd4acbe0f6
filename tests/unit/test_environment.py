"""The versions that run are the versions that the environment promises."""

from __future__ import annotations

import os
import sys

import django
import pytest


@pytest.mark.skipif(
    "DISTLOCK_TEST_VERSIONS" not in os.environ, reason="only tox's environments promise versions"
)
def test_versions_are_the_ones_that_tox_names() -> None:
    """Python and Django are those in the name of the environment."""
    python, django_version = os.environ["DISTLOCK_TEST_VERSIONS"].split("-")
    assert python == f"py{sys.version_info.major}{sys.version_info.minor}"
    assert django_version == f"django{django.VERSION[0]}{django.VERSION[1]}"
