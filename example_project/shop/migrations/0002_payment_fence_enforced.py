from django.db import migrations

from django_distlock.fencing import EnforceFence


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]

    operations = [EnforceFence("payment")]
