"""Any address and any form of the admin: a page, or a refusal that Django knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from urllib.parse import quote, urlencode

import pytest
from django.test import Client
from hypothesis import given
from hypothesis import strategies as some

from django_distlock.inspection import Operation
from tests.drawn import drawn

from .admin_settings import LOCKS

#: With lone surrogates, NUL, wildcards, and what Django quotes ids with.
ODD = some.text("0_:%&=?\\*\0\ud800é-", min_size=1, max_size=6)
TEXTS = some.text(max_size=20) | ODD
VALUES = TEXTS | some.integers().map(str) | some.sampled_from(
    ["postgres", "redis", "memory", "held", "overdue", "60", "-key", "2026-11-26", "force_release"]
)  # fmt: skip
#: What the pages read, and what Django's own lists do.
NAMES = TEXTS | some.sampled_from([
    "backend", "begins", "contains", "state", "host", "task", "age", "order", "cursor", "live",
    "key", "fence", "q", "p", "o", "e", "all", "kind__exact", "at__gte", "at", "pk__in",
    "_to_field", "_popup", "_facets", "paused_by__gt", "fence__range", "key__regex",
    "backend__isnull",
])  # fmt: skip
PAGES = some.sampled_from(["", "key/", "operate/", "cleanup/", "../fencecounter/", "../lockevent/"])
VIEWS = some.sampled_from(["change/", "history/", "delete/", ""])
#: Page, not modified, elsewhere, and what is refused: as nonsense, to all, or as nowhere.
ANSWERS = {200, 302, 304, 400, 403, 404, 503}


def encoded(pairs: list[tuple[str, str]]) -> str:
    """Return what a browser would send, which need not be UTF-8."""
    return urlencode(pairs, errors="surrogatepass")


@pytest.fixture
def answers(reader: Client) -> Iterator[Callable[..., None]]:
    """Give what asks for a page, and sees that it is no error of ours; some are pages."""
    seen: Counter[int] = Counter()

    def ask(page: str, asked: str, form: str | None = None) -> None:
        address = f"{LOCKS}{page}?{asked}"
        if form is None:
            response = reader.get(address)
        else:
            response = reader.post(address, form, "application/x-www-form-urlencoded")
        assert response.status_code in ANSWERS
        seen[response.status_code] += 1

    yield ask
    assert seen[200] + seen[302] > seen.total() / 10, seen


def test_any_parameters_are_answered(answers: Callable[..., None]) -> None:
    """Of lists, of the page of a key, and of the rows that Django itself shows."""
    ids = ODD.map(lambda each: quote(each, "", errors="surrogatepass"))
    models = some.sampled_from(["heldlock", "fencecounter", "lockevent"])

    @drawn(150)
    @given(
        page=PAGES | some.builds("../{}/{}/{}".format, models, ids, VIEWS),
        asked=some.lists(some.tuples(NAMES, VALUES), max_size=3),
    )  # fmt: skip
    def look(page: str, asked: list[tuple[str, str]]) -> None:
        answers(page, encoded(asked))

    look()


def test_any_form_is_answered(answers: Callable[..., None], key: str) -> None:
    """What is done to keys, sent with any fields: confirmed or not, for keys or for nonsense."""
    known = some.just(urlencode({"backend": "postgres", "key": key, "fence": 1}))
    other = ODD.map(lambda each: encoded([("backend", "memory"), ("key", each)]))
    nonsense = TEXTS | some.builds("backend={}&key={}&fence={}".format, VALUES, VALUES, VALUES)

    @drawn(100)
    @given(
        operation=some.sampled_from(Operation),
        targets=some.lists(known | other | nonsense, max_size=2),
        fields=some.lists(
            some.tuples(
                some.sampled_from(["reason", "within", "minutes", "confirmed", "back"]), VALUES
            )
        ),
    )
    def send(operation: Operation, targets: list[str], fields: list[tuple[str, str]]) -> None:
        form = [("operation", operation), *(("target", each) for each in targets), *fields]
        answers("operate/", "", encoded(form))

    send()
