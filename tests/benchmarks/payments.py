"""The rows that are written: models, which need settings, so this is imported late."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models

from django_distlock.fencing import FencedModel, FencedQuerySet


class Plain(models.Model):
    """The same columns, and nobody looks at them."""

    value = models.IntegerField(default=0)
    fence = models.PositiveBigIntegerField(default=0)

    class Meta:
        app_label = "bench"

    def __str__(self) -> str:
        return str(self.pk)


class Payment(FencedModel):
    """Refuses who comes too late."""

    objects: ClassVar[Any] = FencedQuerySet.as_manager()

    value = models.IntegerField(default=0)

    class Meta:
        app_label = "bench"

    def __str__(self) -> str:
        return str(self.pk)
