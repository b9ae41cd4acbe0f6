"""The backend that a how-to writes keeps the contract, as a project of its own runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import test_testing_kit_projects
from .test_testing_kit_projects import project, run_pytest

__all__ = ["project"]
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/write-a-backend.md"
EXAMPLE = ROOT / "example_project/folder_locks.py"

SETTINGS = """
SECRET_KEY = "only for tests"
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_distlock"]
USE_TZ = True
"""
# As `startproject` writes it, with a path.
DATABASE = """
from pathlib import Path
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path("db.sqlite3")}}
"""

LOCKS = """
import asyncio
import pytest
from django.core.management import call_command
from django_distlock import LockNotAcquired, distlock, inspection

def test_lock_is_held_waited_for_and_kept():
    with distlock("invoice:1", ttl=5) as first:
        first.extend()
        assert distlock("invoice:1").locked()
    with distlock("invoice:1", min_hold=60) as second:
        assert second.fence > first.fence
    with pytest.raises(LockNotAcquired) as caught, distlock("invoice:1", wait=0):
        pass
    assert caught.value.settled
    assert inspection.show("invoice:1").held.fence == second.fence
    assert inspection.show("never").held is None

def test_fence_of_a_free_key_is_not_known(capsys):
    distlock("invoice:3").acquire().release()
    call_command("distlock_show", "invoice:3")
    assert "fence       not known" in capsys.readouterr().out

def test_coroutines_wait_for_each_other():
    async def work():
        async with distlock("invoice:2", wait=5) as lease:
            return lease.fence
    async def both():
        return await asyncio.gather(work(), work())
    assert len(set(asyncio.run(both()))) == 2
"""


@pytest.mark.parametrize(
    ("defined", "skipped"),
    [
        ("all", {"supports_token_lookup"}),
        ("four", {"supports_token_lookup", "supports_listing", "supports_operators"}),
    ],
)
def test_backend_of_the_how_to_keeps_the_contract(
    project: Path, defined: str, skipped: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of its methods, and with the four that are required, every promise holds.

    The contract needs pytest alone. Locks, which work from the four, need Django's apps.
    """
    shown, settings, test = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    code = EXAMPLE.read_text()
    assert sum(map(bool, code.splitlines())) <= 150
    # The page prints the beginning of the class as it is.
    assert shown.partition("\n")[2].strip() in code
    if defined == "four":
        code = re.sub(
            r"    # What it can do beside\n.*?(?=    # Files\n)", "", code, flags=re.DOTALL
        )
    # Leases end while it waits for them, also on a busy machine.
    monkeypatch.setattr(test_testing_kit_projects, "PATIENCE", 300)
    (project / "myproject").mkdir()
    (project / "myproject/locks.py").write_text(code)
    folder = settings.replace("/var/lib/myproject/locks", str(project / "locks"))
    database = DATABASE if defined == "all" else ""
    (project / "project_settings.py").write_text(SETTINGS + database + folder)
    (project / "test_contract.py").write_text(test + (LOCKS if defined == "four" else ""))
    # What processes contend by is the same text in both, and each would be a Python of its own.
    once = "--deselect=test_contract.py::TestFolderBackend::test_one_of_many_processes_is_granted"
    told = run_pytest(project, "-rs", "-pno:django" if defined == "all" else once)
    assert re.search(r"\d\d passed, \d skipped", told), told
    assert set(re.findall(r"FolderBackend: (\w+) is not so", told)) == skipped
