"""The project as WSGI, for gunicorn and uWSGI."""

from __future__ import annotations

import os

from django.core.wsgi import get_wsgi_application

application = get_wsgi_application()

# Not above: they need the apps.
from .preload import prepare  # noqa: E402

if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
    from django_distlock.contrib import prometheus

    prometheus.install(named=os.environ["DISTLOCK_TEST_PRELOAD"].split())

prepare()
