"""A project with Django's admin, for tests of its pages."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.apps import apps
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import Client, modify_settings, override_settings

from django_distlock.inspection import Operation

from .admin_settings import APPS, MIDDLEWARE, TEMPLATES


@contextmanager
def admin_project() -> Iterator[type[Any]]:
    """Serve the admin; give the model of its log."""
    with ExitStack() as stack:
        stack.enter_context(modify_settings(INSTALLED_APPS={"append": list(APPS)}))
        stack.enter_context(
            override_settings(
                ROOT_URLCONF="tests.integration.admin_urls",
                MIDDLEWARE=MIDDLEWARE,
                TEMPLATES=[TEMPLATES],
                STATIC_URL="/static/",
                SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
            )
        )
        from django.contrib.admin.models import LogEntry

        # Else a registry whose models came and went does not know that entries go with their user.
        apps.clear_cache()
        connection = connections["default"]
        made = LogEntry._meta.db_table not in connection.introspection.table_names()
        if made:
            with connection.schema_editor() as editor:
                editor.create_model(LogEntry)
        try:
            yield LogEntry
        finally:
            if made:
                with connection.schema_editor() as editor:
                    editor.delete_model(LogEntry)
                connection.close()


@contextmanager
def user_who_may(*operations: Operation) -> Iterator[User]:
    """Give a member of the staff who may do just this."""
    user = User.objects.create(username=f"u{secrets.token_hex(6)}", is_staff=True)
    for each in operations:
        user.user_permissions.add(
            Permission.objects.get(
                content_type__app_label="django_distlock", codename=each.codename
            )
        )
    try:
        yield user
    finally:
        User.objects.filter(pk=user.pk).delete()


def browser_of(user: User, **kwargs: Any) -> Client:
    """Give a client that the user has logged in with."""
    client = Client(**kwargs)
    client.force_login(user, "django.contrib.auth.backends.ModelBackend")
    return client
