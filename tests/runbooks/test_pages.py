"""What all runbooks have, and that nothing in them is run by nobody."""

from __future__ import annotations

import re
import socket
from importlib import import_module
from pathlib import Path

import pytest

from .incidents import holder
from .pages import FOLDER, NAMES, SECTIONS, Block, blocks, code_in_text, commands, sections
from .sites import Site
from .walks import PLANNED, Plan, planned_blocks

LANGUAGES = {"console", "sql", "python"}
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def planned() -> set[Plan]:
    """Give what all tests stage."""
    for path in sorted(HERE.glob("test_*.py")):
        import_module(f"{__package__}.{path.stem}")
    return PLANNED


def due(block: Block) -> set[tuple[Block, str]]:
    """Return on which stores a block has to be run; "": on any."""
    return {(block, store) for store in block.stores or ("",)}


def test_each_page_can_be_followed() -> None:
    """It has the four sections, blocks that can be run, and a way in."""
    index = (FOLDER / "index.md").read_text()
    for page in NAMES:
        assert tuple(sections(page)) == SECTIONS, page
        assert blocks(page), page
        # A block in another language would be shown and never tried.
        assert {each.language for each in blocks(page)} <= LANGUAGES, page
        assert all(commands(each) for each in blocks(page) if each.language == "console"), page
        assert f"[]({page}.md)" in index
        assert f"\n{page}\n" in index


def test_every_block_is_run(planned: set[Plan]) -> None:
    """Each block of Confirm and Act is part of a case that is staged, on each store it names.

    Whoever follows a page in a case has something to do at the end.
    """
    run: set[tuple[Block, str]] = set()
    for plan in planned:
        staged = planned_blocks(plan)
        assert "Act" in {each.section for each in staged}, plan
        run |= {(block, store) for block in staged for store in ("", plan.store)}
    every = [each for page in NAMES for each in blocks(page)]
    assert [f"{block} {store}" for each in every for block, store in due(each) - run] == []


def test_pages_are_those_that_there_are() -> None:
    """The names that findings and checks lead to, and the way in, which name whole commands."""
    pages = {*NAMES, "index"}
    assert {path.stem for path in FOLDER.glob("*.md")} == pages
    # What the text says to run can be typed as it stands: the options alone cannot.
    named = [each for page in pages for each in code_in_text(page) if each.startswith("distlock_")]
    assert [each for each in named if " " in each] == []


def test_commands_in_the_text_run(postgresql: str) -> None:
    """Each of them, on a store that is well, and with a lock of the host that they name."""
    site = Site("postgresql", postgresql)
    # The server of the tests does not wait for its disk.
    site.settings["SILENCED_SYSTEM_CHECKS"] += ["distlock.W108"]
    # One command is about tasks.
    site.settings["INSTALLED_APPS"] += ["tests.runbooks.queueing"]
    site.make_tables()
    with holder(site, "invoice:42", ttl=3600) as process:
        process.kill()
    lines = {
        line
        for page in ("index", *NAMES)
        for line in code_in_text(page)
        if line.startswith("python manage.py")
    }
    assert len(lines) > 5
    release = {line for line in lines if "--force" in line}
    for line in [*release, *sorted(lines - release)]:
        ran = site.command(line.replace("web-3", socket.gethostname()))
        assert ran.status == 0, f"{line}: {ran.status}\n{ran.text}"


def test_nothing_that_is_pasted_harms_fences() -> None:
    """No statement deletes a counter, lowers a fence, empties a table or shows a token."""
    harmful = re.compile(
        r"delete from django_distlock_fencecounter|\b(truncate|flushall|flushdb)\b|token"
        r"|del '?distlock:"
    )
    for block in [each for page in NAMES for each in blocks(page)]:
        words = " ".join(block.text.lower().split())
        assert not harmful.search(words), block
        if "update django_distlock_fencecounter" in words:
            assert "and fence <" in words or "where fence <" in words, block


def test_no_statement_compares_with_the_local_time() -> None:
    """On MariaDB, `UNIX_TIMESTAMP(NOW())` is an hour ahead in the last hour of summer time.

    What deletes expired leases would delete live ones.
    """
    for block in [each for page in NAMES for each in blocks(page)]:
        assert "now(" not in block.text.lower(), block
