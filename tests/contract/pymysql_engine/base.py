"""What Django imports of an engine."""

from __future__ import annotations

from importlib import import_module

import_module("pymysql").install_as_MySQLdb()
DatabaseWrapper = import_module("django.db.backends.mysql.base").DatabaseWrapper
