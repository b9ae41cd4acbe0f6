"""The shop's tables."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from django_distlock.fencing import FencedModel


class Product(models.Model):
    """Something to sell, as long as there is stock."""

    objects: ClassVar[models.Manager[Product]]

    name = models.CharField(max_length=100, unique=True)
    stock = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Payment(FencedModel):
    """Money that a customer promised and a provider has to be asked for, once.

    A row remembers the highest fence that touched it, and refuses whoever comes with a lower one.
    """

    fence_key = "payment:{pk}"

    class Status(models.TextChoices):
        """How far it got."""

        OPEN = "open"
        CAPTURED = "captured"

    customer = models.CharField(max_length=100, unique=True)
    amount = models.DecimalField(max_digits=8, decimal_places=2)
    status = models.CharField(max_length=10, choices=Status, default=Status.OPEN)

    def __str__(self) -> str:
        return f"{self.customer}: {self.amount}"


class Report(models.Model):
    """What the night found, once for each day."""

    objects: ClassVar[models.Manager[Report]]

    day = models.DateField(unique=True)
    made_at = models.DateTimeField(auto_now_add=True)
    pieces_in_stock = models.IntegerField()
    payments_captured = models.IntegerField()
    fence = models.BigIntegerField()

    class Meta:
        get_latest_by = "day"

    def __str__(self) -> str:
        return f"Report of {self.day}"
