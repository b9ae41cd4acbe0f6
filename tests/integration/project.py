"""Settings of a small project, which a test gives to a process of its own as JSON."""

from __future__ import annotations

import json
import os

INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_distlock"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = "only for tests"
USE_TZ = True

globals().update(json.loads(os.environ.get("DISTLOCK_TEST_PROJECT", "{}")))
