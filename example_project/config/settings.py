"""Settings of the example: for a demonstration on one machine, not for the internet."""

import os
from pathlib import Path

import django
from celery.schedules import crontab

from config.databases import postgres, sqlite
from config.locks import backend
from config.queue import broker

BASE_DIR = Path(__file__).parent.parent

# Where files go: SQLite's, and what waits for a worker.
folder = Path(os.environ.get("SHOP_DATA_DIR", BASE_DIR))

# The database: a PostgreSQL server, or two SQLite files.
if url := os.environ.get("DATABASE_URL"):
    DATABASES = {"default": postgres(url)}
    LOCKS = "default"
else:
    DATABASES = {
        "default": sqlite(folder / "shop.sqlite3"),
        "locks": sqlite(folder / "locks.sqlite3"),
    }
    DATABASE_ROUTERS = ["config.databases.LocksRouter"]
    LOCKS = "locks"

# The locks: in that database, in Redis, or held by sessions of PostgreSQL. Nothing else changes.
DISTLOCK = {
    "default": {
        "KEY_PREFIX": "shop",
        **backend(os.environ.get("SHOP_LOCKS", ""), using=LOCKS),
    },
    # Jobs keep their keys for a while after they end, which sessions cannot.
    "jobs": {
        "KEY_PREFIX": "shop-jobs",
        **backend("database", using=LOCKS),
    },
}

# A name for this process, if whoever starts it gives one: it is the successor of its namesake.
DISTLOCK_HOLDER = {"process": os.environ.get("SHOP_WORKER") or None}

# What programs show to /locks/health and its neighbours. Without one, they are for the staff alone.
DISTLOCK_MONITOR_TOKEN = os.environ.get("SHOP_MONITOR_TOKEN") or None

# Each release is an event: the page of a key shows its past holders. A busy site keeps a part.
DISTLOCK_HISTORY = 1

# Jobs: on as many workers as you like, and a beat beside each of them, of which one leads.
CELERY_BROKER_URL, CELERY_BROKER_TRANSPORT_OPTIONS = broker(
    os.environ.get("SHOP_BROKER", ""), folder / "queue"
)
CELERY_BEAT_SCHEDULE_FILENAME = str(folder / "queue" / "beat")
CELERY_WORKER_HIJACK_ROOT_LOGGER = False  # see LOGGING
CELERY_TASK_IGNORE_RESULT = True
CELERY_BEAT_SCHEDULER = "django_distlock.contrib.celery.scheduler:DistlockScheduler"
CELERY_BEAT_DISTLOCK_BACKEND = "jobs"
CELERY_BEAT_SCHEDULE = {
    "nightly-report": {
        "task": "shop.tasks.nightly_report",
        "schedule": float(os.environ.get("SHOP_REPORT_SECONDS", "0")) or crontab(hour=3, minute=0),
    },
}

# What every Django project says
DEBUG = True
SECRET_KEY = "public: for the demonstration only"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "config.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TIME_ZONE = "UTC"
USE_TZ = True
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.humanize",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_distlock",
    "shop",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
# Scripts and styles from here alone: the dashboard of the locks needs nothing else.
if django.VERSION >= (6, 0):
    MIDDLEWARE.insert(1, "django.middleware.csp.ContentSecurityPolicyMiddleware")
    SECURE_CSP = {"default-src": ["'self'"]}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"shop": {"handlers": ["console"], "level": "INFO"}},
}
