"""The audit finds nothing wrong in Django, nor in what stands beside it."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from django_distlock.audit.__main__ import Audit
from django_distlock.audit.sources import files


@pytest.mark.parametrize(
    "name",
    [
        "django_distlock",
        "django_redis",
        "psycopg",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("celery", "django", "kombu", "redis")
        ),
    ],
)
def test_nothing_is_wrong_in(name: str) -> None:
    """Each file is read."""
    # By the path: `kombu` and others hide what they are, once they have been imported.
    found = PathFinder.find_spec(name)
    assert found is not None
    assert found.origin is not None
    audit = Audit()
    for path in files([Path(found.origin).parent]):
        audit.read(path)
    assert audit.files > 5
    assert audit.unread == {}
    assert audit.findings() == []
