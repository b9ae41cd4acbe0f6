"""On PostgreSQL, a secret for what everybody who may connect can see, take or listen to."""

from django.db import migrations

from django_distlock.sql.operations import InstallScripts


class Migration(migrations.Migration):
    dependencies = [("django_distlock", "0006_fixed_search_path")]

    # Beside the functions that workers of the release before call.
    operations = [InstallScripts(functions_only=True)]
