"""The scheduler of django-celery-beat, as one of many."""

from __future__ import annotations

import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from celery import Celery
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone

from django_distlock.contrib.celery import scheduler
from tests.conftest import DECLARED
from tests.contract.aliases import alias_like
from tests.integration.databases import new_database

from .beat_processes import Site, eventually, two_beats

ROWS = "django_distlock.contrib.celery.scheduler:DistlockDatabaseScheduler"

has_rows = pytest.mark.skipif(
    find_spec("django_celery_beat") is None,
    reason=f"{DECLARED}django-celery-beat has no release for this Django",
)


@has_rows
def test_rows_are_sent_once_whoever_is_killed(tmp_path: Path, key: str) -> None:
    """Also what the killed leader had sent and not yet saved: a task that is to run once."""
    every, ttl = 3.0, 1.0
    with new_database() as name, alias_like("default", NAME=name) as alias:
        site = Site(
            tmp_path,
            key,
            "redis",
            every=every,
            ttl=ttl,
            using=alias,
            INSTALLED_APPS=[*settings.INSTALLED_APPS[:3], "django_celery_beat"],
        )
        site.environment["DISTLOCK_TEST_BEAT_ONCE"] = str(time.time() + 20)
        site.project.manage("migrate", "-v", "0")
        with site.worker() as worker, two_beats(site, ROWS) as (leads, follows):
            worker.says("ready")
            eventually(lambda: "once" in _names(site), "what is to run once")
            leads.kill()
            count = len(site.ran())
            follows.says("Beat leads")
            site.wait_for_ticks(count + 3)
        assert _names(site).count("once") <= 1, "a tick was run twice"
        assert _names(site).count("once") == 1
        notes = [each["sent_at"] for each in site.ran() if each["name"] == "note"]
        gaps = [later - sooner for sooner, later in pairwise(notes)]
        assert min(gaps) > every / 2, gaps


@has_rows
def test_row_that_is_made_anew_runs_again(tmp_path: Path, key: str) -> None:
    """Also one that is to run once, from a time on: the mark of its name is that of another row."""
    with new_database() as name, alias_like("default", NAME=name) as alias:
        apps = [*settings.INSTALLED_APPS[:3], "django_celery_beat"]
        site = Site(tmp_path, key, "redis", every=3.0, ttl=5.0, using=alias, INSTALLED_APPS=apps)
        site.project.manage("migrate", "-v", "0")
        assert site.project.run("tests.celery.test_beat_database:run_rows", key) == [1, 2]


def run_rows(key: str) -> list[int]:
    """Let a beat send what is to run once, and that again when its row was made anew."""
    from django_celery_beat.models import IntervalSchedule, PeriodicTask

    ran: list[int] = []
    app = Celery("rows", broker="memory://")

    @app.task(name="rows.note")
    def note(number: int) -> None:
        ran.append(number)

    app.conf.update(task_always_eager=True, beat_distlock_key=key)
    daily = IntervalSchedule.objects.create(every=1, period="days")
    beat = scheduler.DistlockDatabaseScheduler(app=app, max_interval=0.1)
    beat.tick()
    for number in (1, 2):
        PeriodicTask.objects.filter(name="once").delete()
        PeriodicTask.objects.create(
            name="once",
            task="rows.note",
            args=f"[{number}]",
            interval=daily,
            one_off=True,
            start_time=timezone.now(),
        )
        give_up = time.monotonic() + 10
        while len(ran) < number and time.monotonic() < give_up:
            beat.tick()
            time.sleep(0.02)
    beat.close()
    return ran


@pytest.mark.skipif(find_spec("django_celery_beat") is not None, reason="it is installed")
def test_says_what_is_missing() -> None:
    """Whoever has no django-celery-beat is told what to install, when they name the class."""
    with pytest.raises(ImproperlyConfigured, match="pip install django-celery-beat"):
        _ = scheduler.DistlockDatabaseScheduler


def test_nothing_else_is_made_up() -> None:
    """A name that the module does not have is an error, as everywhere."""
    with pytest.raises(AttributeError, match="has no attribute 'Distlock'"):
        _ = scheduler.Distlock


def _names(site: Site) -> list[str]:
    return [each["name"] for each in site.ran()]
