"""What people read in another language: all of it, and as it was written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import polib
import pytest

import django_distlock
from tests.poolers import without

PACKAGE = Path(django_distlock.__file__).parent
CATALOGUES = sorted(PACKAGE.glob("locale/*/LC_MESSAGES/django.po"))
PLACE = "LC_MESSAGES/django.po"


@pytest.fixture(params=CATALOGUES, ids=lambda path: path.parts[-3])
def catalogue(request: pytest.FixtureRequest) -> Path:
    """Give each translation."""
    path: Path = request.param
    return path


def test_there_is_one() -> None:
    """At least German is whole."""
    assert "de" in [path.parts[-3] for path in CATALOGUES]


def test_every_text_is_translated(catalogue: Path) -> None:
    """None is missing, and none is a guess."""
    entries = polib.pofile(str(catalogue))
    assert [each.msgid for each in entries if not each.translated()] == []


def test_placeholders_are_kept(catalogue: Path) -> None:
    """A text that lost one would be an error on a page."""
    for each in polib.pofile(str(catalogue)):
        texts = [each.msgstr, *each.msgstr_plural.values()]
        for text in filter(None, texts):
            assert sorted(_placeholders(text)) == sorted(_placeholders(each.msgid)), each.msgid


def test_compiled_catalogue_is_that_of_the_text(catalogue: Path) -> None:
    """Django reads the one, people the other."""
    compiled = {each.msgid: each for each in polib.mofile(str(catalogue.with_suffix(".mo")))}
    for each in polib.pofile(str(catalogue)):
        there = compiled.pop(each.msgid)
        assert (there.msgstr, there.msgstr_plural) == (each.msgstr, each.msgstr_plural)
    assert not compiled


def test_catalogue_has_what_the_code_says(catalogue: Path, tmp_path: Path) -> None:
    """A text that was changed in the code is changed here, too."""
    if shutil.which("xgettext") is None:
        without("gettext", "apt-get install gettext")
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "locale"))
    language = catalogue.parts[-3]
    (copy / "locale").mkdir()
    command = ["-m", "django", "makemessages", "-l", language, "--no-location", "--no-wrap"]
    subprocess.run([sys.executable, *command], cwd=copy, check=True, capture_output=True)
    made = polib.pofile(str(copy / "locale" / language / PLACE))
    said = {(each.msgid, each.msgid_plural) for each in made}
    assert said == {(each.msgid, each.msgid_plural) for each in polib.pofile(str(catalogue))}


def _placeholders(text: str) -> list[str]:
    return re.findall(r"%(?:\(\w+\))?[a-z%]", text)
