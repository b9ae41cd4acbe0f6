"""On PostgreSQL, functions that call nothing but PostgreSQL's own, whatever stands beside them."""

from django.db import migrations

from django_distlock.sql.operations import InstallScripts


class Migration(migrations.Migration):
    dependencies = [("django_distlock", "0005_no_timed_out")]

    # `migrate` brings the trigger's function up to date behind it.
    operations = [InstallScripts(functions_only=True)]
