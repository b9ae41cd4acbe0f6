"""The one table of the shop."""

from __future__ import annotations

from django.db import models


class Row(models.Model):
    """Something that competing processes read, change and write back."""

    name = models.CharField(max_length=100)
    value = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.name}={self.value}"
