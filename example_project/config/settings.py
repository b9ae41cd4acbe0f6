"""Settings of the example: for a demonstration on one machine, not for the internet."""

import os
from pathlib import Path

from config.databases import postgres, sqlite
from config.locks import backend

BASE_DIR = Path(__file__).parent.parent

# The database: a PostgreSQL server, or two SQLite files.
if url := os.environ.get("DATABASE_URL"):
    DATABASES = {"default": postgres(url)}
    LOCKS = "default"
else:
    folder = Path(os.environ.get("SHOP_DATA_DIR", BASE_DIR))
    DATABASES = {
        "default": sqlite(folder / "shop.sqlite3"),
        "locks": sqlite(folder / "locks.sqlite3"),
    }
    DATABASE_ROUTERS = ["config.databases.LocksRouter"]
    LOCKS = "locks"

# The locks: in that database, in Redis, or held by sessions of PostgreSQL. Nothing else changes.
DISTLOCK = {
    "default": {"KEY_PREFIX": "shop", **backend(os.environ.get("SHOP_LOCKS", ""), using=LOCKS)},
}

# What every Django project says
DEBUG = True
SECRET_KEY = "known to everybody: for the demonstration only"
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
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"shop": {"handlers": ["console"], "level": "INFO"}},
}
