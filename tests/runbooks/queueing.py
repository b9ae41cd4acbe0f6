"""A project that sends a unique task which nobody works at: its queue has no worker."""

from __future__ import annotations

from celery import Celery, shared_task

from django_distlock.contrib.celery import LockedTask, locked_task

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.set_default()


@shared_task(base=LockedTask)
@locked_task(unique="invoice:{number}", ttl=60)
def bill(number: int) -> None:
    """Send a bill."""


def send() -> str:
    """Send the task, unless it is queued; return the id of the one that is."""
    return str(bill.delay(42).id)


def purge() -> int:
    """Do what `celery purge` does; return how many messages are gone."""
    return int(app.control.purge())
