"""What README and documentation say about this repository is so."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from django_distlock.core.pages import DOCS_URL

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text()
CODE = "".join(each.read_text() for each in sorted((ROOT / "django_distlock").rglob("*.py")))
#: The ids that the code reports.
CHECKS = set(re.findall(r'id="(distlock\.\w+)"', CODE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def versions(of: str) -> set[str]:
    """Return the versions that the package says it runs on."""
    classifiers = " ".join(PROJECT["classifiers"])
    return set(re.findall(rf"{of} :: (\d+\.\d+)", classifiers))


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


#: Words that a reader stumbled over, in places that users read or that describe them.
OLD_WORDS = re.compile(
    "for who uses|Take (?:the|a) key from its holder|Ask(?:s|ed)? (?:the holder )?to finish"
    "|Let the lease end|No lock is held that fits|>Go on|(?:ask|look)s? again and again"
    "|Worst heartbeat|Held past expiry|does not know what it was asked for",
    re.IGNORECASE,
)
READ = (".html", ".js", ".json", ".lua", ".md", ".po", ".py", ".sql", ".yml")


@pytest.mark.parametrize("of", ["Python", "Django"])
def test_readme_names_the_versions_that_the_package_declares(of: str) -> None:
    """All of them, and no other."""
    named = re.search(rf"{of} ((?:\d+\.\d+(?:, | and )?)+)", README)
    assert named
    assert set(re.findall(r"\d+\.\d+", named[1])) == versions(of)


def test_readme_is_short() -> None:
    """It fits on a few screens; whatever else there is to say has a page."""
    assert len(README.splitlines()) <= 150


def test_documentation_is_short() -> None:
    """Its pages without the records of decisions, counted as `wc -w` does."""
    pages = [each for each in (ROOT / "docs").rglob("*.md") if each.parent.name != "decisions"]
    assert sum(len(each.read_text().split()) for each in pages) <= 35_000


def test_old_words_are_gone() -> None:
    """In code, pages, texts and tests."""
    found = {
        str(each.relative_to(ROOT)): OLD_WORDS.findall(each.read_text())
        for folder in ("django_distlock", "docs", "example_project", "tests")
        for each in (ROOT / folder).rglob("*")
        if each.suffix in READ and each != Path(__file__) and "_build" not in each.parts
    }
    assert {file: words for file, words in found.items() if words} == {}


def test_contributing_tells_how_long_the_reading_path_is() -> None:
    """The core is read in ten minutes: the number of lines is right, and has a bound."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    path = contributing.partition("## Read the code")[2].partition("Then, by")[0]
    files = re.findall(r"`(django_distlock/[\w/]+\.py)`", path)
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    told = re.search(r"about ([\d,]+) lines", path)
    assert len(files) == 4
    assert told
    assert abs(int(told[1].replace(",", "")) - lines) <= 50, lines
    assert lines <= 1200


def test_python_of_the_tutorial_is_the_oldest_that_is_required() -> None:
    """`requires-python` and the first page that a newcomer reads agree."""
    tutorial = (ROOT / "docs/tutorial/first-lock.md").read_text()
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or later" in tutorial


def wrong_on(page: Path) -> Iterator[str]:
    """Tell what a page says that is not so."""
    text = page.read_text()
    for of in ("Python", "Django"):
        # One that a page names is one that the package runs on.
        yield from set(re.findall(rf"\b{of} (\d+\.\d+)", prose(page))) - versions(of)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target and not (page.parent / target.split("#")[0]).exists():
            yield target
    for path in re.findall(
        r"`((?:\.ci|tests|docs|django_distlock|example_project)/[\w./-]+)`", prose(page)
    ):
        if not (ROOT / path).exists():
            yield path
    yield from sorted(set(re.findall(r"\bdistlock\.[EW]\d{3}\b", text)) - CHECKS)
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        try:
            compile(block, page.name, "exec", flags=0x2000)  # top-level await
        except SyntaxError as error:
            yield f"{error}: {block}"


def test_pages_say_what_is_so() -> None:
    """Versions are ours, links and paths lead somewhere, whoever copies a block can run it."""
    found = {str(page.relative_to(ROOT)): [*wrong_on(page)] for page in PAGES}
    assert {page: wrong for page, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("install", "tutorial/first-lock"),
        ("stampede", "howto/compute-once"),
        ("read/write lock", "howto/lease-or-transaction"),
        ("semaphore", "glossary"),
        ("semaphore", "howto/share-a-key"),
        ("read/write lock", "howto/share-a-key"),
        ("mutex", "glossary"),
    ],
)
def test_page_has_the_words_that_people_search_for(words: str, page: str) -> None:
    """A search finds the page by them."""
    assert words in (ROOT / f"docs/{page}.md").read_text().lower()


@pytest.mark.parametrize("words", ["install", "semaphore", "read/write lock", "cache stampede"])
def test_landing_page_leads_on_from_common_words(words: str) -> None:
    """It names what a newcomer looks for."""
    assert words in (ROOT / "docs/index.md").read_text().lower()


def test_checks_page_lists_the_checks() -> None:
    """Every id that the code reports has an entry, and every entry an id."""
    page = (ROOT / "docs/reference/checks.md").read_text()
    assert set(re.findall(r"^- `(distlock\.\w+)`:", page, re.MULTILINE)) == CHECKS


def test_addresses_lead_to_pages_of_the_documentation() -> None:
    """Those in hints, in alert rules and in the package's metadata, which are all in one place."""
    alerts = (ROOT / "django_distlock/contrib/monitoring/alerts.yml").read_text()
    fixed = alerts + (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r"https://django-distlock[\w.-]*/en/\w+/", fixed)) == {DOCS_URL}
    pages = set(re.findall(rf"{re.escape(DOCS_URL)}([\w/-]+)\.html", fixed))
    pages |= set(re.findall(r"""\bpage\(['"]([\w/-]+)['"]\)""", CODE))
    assert {"CHANGELOG", "howto/production", "runbooks/stuck-lock"} <= pages
    assert [each for each in sorted(pages) if not (ROOT / f"docs/{each}.md").is_file()] == []


def test_troubleshooting_names_codes_that_errors_have() -> None:
    """Each code exists, and the page has the forty commonest errors."""
    page = (ROOT / "docs/howto/troubleshooting.md").read_text()
    named = set(re.findall(r"\bcode `(\w+)`", page))
    assert len(named) >= 10
    errors = (ROOT / "django_distlock/core/errors.py").read_text()
    assert named - set(re.findall(r'"(\w+)"', errors)) == set()
    assert len(re.findall(r"^\| (?!you see|---)", page, re.MULTILINE)) >= 40
