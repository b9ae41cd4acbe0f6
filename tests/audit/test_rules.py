"""What each rule finds in the corpus, and what it leaves alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from django_distlock.audit.__main__ import Audit
from django_distlock.audit.rules import RULES

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.py"))


def marked(path: Path, *marks: str) -> set[tuple[int, str]]:
    """Return the lines of a file of the corpus that bear a mark, with the rules it names."""
    return {
        (number, rule.strip())
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for mark in marks
        for rule in (line.partition(f"# {mark}: ")[2] or "").split(",")
        if rule
    }


def found(path: Path) -> set[tuple[int, str]]:
    """Return the lines in which a file breaks a rule."""
    audit = Audit()
    audit.read(path)
    assert audit.unread == {}
    return {(each.line, each.rule) for each in audit.findings()}


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_corpus(path: Path) -> None:
    """Each wrong line is found, and no right one; exceptions are marked, and are on the page."""
    assert found(path) == marked(path, "bad", "false")


def test_page_has_the_figures_of_the_corpus() -> None:
    """How many lines are found, of how many, and how many are reported by mistake."""
    page = (Path(__file__).parents[2] / "docs/howto/audit-lock-code.md").read_text()
    counted = {
        mark: Counter(rule for path in CORPUS for _, rule in marked(path, mark))
        for mark in ("bad", "missed", "false")
    }
    seen, missed, wrong = (each.total() for each in counted.values())
    assert f"finds {seen} of {seen + missed} wrong lines, and reports {wrong} right ones" in page
    for rule in RULES:
        assert counted["bad"][rule] >= 5


@pytest.mark.parametrize("bounds", ["None", "PAGES", "1, 2, 0", "1, 2, 3, 4", f"1{'0' * 400}"])
def test_loop_over_a_range_that_nobody_can_count(tmp_path: Path, bounds: str) -> None:
    """It is taken for one of some passes, as any other."""
    (path := tmp_path / "jobs.py").write_text(
        "from time import sleep\nfrom django.core.cache import cache\nPAGES = None\n"
        f"with cache.lock('some-lock', timeout=5):\n    for page in range({bounds}):\n"
        "        sleep(1)\n"
    )
    assert found(path) == {(4, "loop-outlasts-timeout")}


@pytest.mark.parametrize("seconds", [f"1{'0' * 400}", f"1{'0' * 200} * 1{'0' * 200}"])
def test_seconds_that_nobody_can_wait(tmp_path: Path, seconds: str) -> None:
    """They are no more than what never ends."""
    (path := tmp_path / "jobs.py").write_text(
        "from time import sleep\nfrom django.core.cache import cache\n"
        f"with cache.lock('some-lock', timeout={seconds}):\n    sleep({seconds})\n"
    )
    assert found(path) == set()


@pytest.mark.parametrize(
    "work",
    [
        "try:\n    {}\nexcept* ValueError:\n    pass\nfinally:\n    lock.release()",
        "with lock:\n  try:\n    pass\n  except ValueError:\n    pass\n  else:\n    {}",
        "with lock:\n  match kind:\n    case 1:\n      {}\n    case _:\n      {}",
    ],
)
def test_newer_statements(tmp_path: Path, work: str) -> None:
    """What runs is counted, of several branches the longest one."""
    (path := tmp_path / "jobs.py").write_text(
        "from time import sleep\nfrom django.core.cache import cache\n"
        "lock = cache.lock('some-lock', timeout=5)\n" + work.replace("{}", "sleep(3)")
    )
    assert found(path) == set()
    path.write_text(path.read_text().replace("sleep(3)", "for each in (1, 2):sleep(3)"))
    assert {rule for _, rule in found(path)} == {"loop-outlasts-timeout"}


VIEW = "def view(request):\n    Order.objects.select_for_update().get()\n"
SESSION = "import pglock\nwith pglock.advisory('x'):\n    pass\n"


@pytest.mark.parametrize(
    ("settings", "code", "is_found"),
    [
        ("", VIEW, True),
        ("DATABASES = {'default': {'ATOMIC_REQUESTS': True}}", VIEW, False),
        ("DATABASES = {'default': {'ATOMIC_REQUESTS': False}}", VIEW, True),
        ("DATABASES = {'default': {'ATOMIC_REQUESTS': env('ATOMIC')}}", VIEW, False),
        ("DATABASES['default']['ATOMIC_REQUESTS'] = True", VIEW, False),
        ("DATABASES['default']['ATOMIC_REQUESTS'] = False", VIEW, True),
        ("OTHER = {'ATOMIC_REQUESTS': True}", VIEW, True),
        ("", SESSION, False),
        ("DATABASES = {'default': {'HOST': env('DB', 'pgbouncer')}}", SESSION, True),
        ("DATABASES = {'default': env.db(default='postgres://db:6432/shop')}", SESSION, True),
        ("DATABASES['default']['HOST'] = 'pooler.internal'", SESSION, True),
        ("DATABASES['other']['HOST'] = 'pooler.internal'", SESSION, False),
        ("DATABASES = {'other': {'HOST': 'pgbouncer'}, 'default': {'HOST': 'db'}}", SESSION, False),
        ("DATABASES = {'default': {'HOST': 'db', 'PORT': 5432}, **MORE}", SESSION, False),
    ],
)
def test_settings_of_another_file_count(
    tmp_path: Path, settings: str, code: str, is_found: bool
) -> None:
    """Whether requests are transactions, and whether a pooler stands before the database."""
    for names in (["settings.py", "code.py"], ["code.py", "settings.py"]):
        audit = Audit()
        for name in names:
            (tmp_path / name).write_text(settings if name == "settings.py" else code)
            audit.read(tmp_path / name)
        assert bool(audit.findings()) is is_found
