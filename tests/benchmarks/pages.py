"""The dashboard as the admin renders it, without a browser and without a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.conf import settings
from django.template.response import TemplateResponse
from django.test import RequestFactory, modify_settings, override_settings
from django.urls import resolve

from tests.integration.admin_settings import APPS, LOCKS, TEMPLATES


@contextmanager
def dashboard(alias: str) -> Iterator[Callable[[str], None]]:
    """Give what opens the dashboard of one backend, with a query."""
    apps = ("django.contrib.contenttypes", "django.contrib.auth", *APPS)
    with (
        modify_settings(INSTALLED_APPS={"append": list(apps)}),
        override_settings(
            ROOT_URLCONF="tests.integration.admin_urls",
            TEMPLATES=[TEMPLATES],
            STATIC_URL="/static/",
            # The numbers above the list are of all backends.
            DISTLOCK={alias: settings.DISTLOCK[alias]},
        ),
    ):
        from django.contrib.auth.models import User

        # Who is asked for no row of a table: sessions and users are not what is measured.
        operator = User(username="operator", is_active=True, is_staff=True, is_superuser=True)

        def opened(query: str) -> None:
            request = RequestFactory().get(f"{LOCKS}?{query}")
            request.user = operator
            view, words, named = resolve(LOCKS)
            answer = view(request, *words, **named)
            assert isinstance(answer, TemplateResponse)
            answer.render()
            if failures := (answer.context_data or {})["overview"].outages:
                raise RuntimeError(failures[0].message)

        yield opened
