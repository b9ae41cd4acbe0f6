"""The tests' settings, as a project that is served; a test changes its database by JSON."""

from __future__ import annotations

import json
import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

changes = json.loads(os.environ.get("DISTLOCK_TEST_WEB", "{}"))
default = DATABASES["default"]
options = {**default["OPTIONS"], **changes.pop("OPTIONS", {})}
DATABASES["default"] = {**default, **changes, "OPTIONS": options}

ALLOWED_HOSTS = ["127.0.0.1"]
ROOT_URLCONF = "tests.setups.web.urls"
DISTLOCK_MONITOR_TOKEN = "only-for-these-tests"
# A test that meets an error shows what the server wrote.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
    "loggers": {"django": {"handlers": ["stderr"], "level": "ERROR", "propagate": False}},
}
