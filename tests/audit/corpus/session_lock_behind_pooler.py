import pglock
from django.db import connection, connections
from django_distlock import transaction_lock
from django_distlock.compat import pglock as compat
from django_pglocks import advisory_lock

DATABASES = {
    "default": {"ENGINE": "django.db.backends.postgresql", "HOST": "pgbouncer", "PORT": "6432"},
    "direct": {"ENGINE": "django.db.backends.postgresql", "HOST": "postgres"},
    "reports": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": "reports",
        "DISABLE_SERVER_SIDE_CURSORS": True,
    },
}
TRY = "SELECT pg_try_advisory_lock(%s)"

def by_hand():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [7])  # bad: session-lock-behind-pooler

def by_a_constant():
    with connection.cursor() as cursor: cursor.execute(TRY, [7])  # bad: session-lock-behind-pooler

def by_alias():
    with connections["reports"].cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock_shared(7)")  # bad: session-lock-behind-pooler

def by_a_package(report):
    with pglock.advisory("report"): report.make()  # bad: session-lock-behind-pooler

def by_another_package(report):
    with advisory_lock("report"): report.make()  # bad: session-lock-behind-pooler

@pglock.advisory("report")  # bad: session-lock-behind-pooler
def decorated(report): report.make()

def by_a_procedure(alias):
    with connections[alias].cursor() as cursor:
        cursor.callproc("pg_advisory_lock", [7])  # missed: session-lock-behind-pooler

# What follows is right.

def on_a_connection_of_its_own(report):
    with pglock.advisory("report", using="direct"): report.make()

def on_a_cursor_of_its_own():
    with connections["direct"].cursor() as cursor: cursor.execute("SELECT pg_advisory_lock(7)")

def of_the_transaction():
    with connection.cursor() as cursor: cursor.execute("SELECT pg_advisory_xact_lock(7)")

def of_the_transaction_by_a_package(report):
    with pglock.advisory("report", xact=True): report.make()

def ours(report): transaction_lock("report")

def ours_by_the_package_s_name(report):
    with compat.advisory("report"): report.make()
