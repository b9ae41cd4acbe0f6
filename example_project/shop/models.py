"""The shop's tables."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Product(models.Model):
    """Something to sell, as long as there is stock."""

    objects: ClassVar[models.Manager[Product]]

    name = models.CharField(max_length=100, unique=True)
    stock = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Payment(models.Model):
    """Money that a customer promised and a provider has to be asked for, once."""

    objects: ClassVar[models.Manager[Payment]]

    class Status(models.TextChoices):
        """How far it got."""

        OPEN = "open"
        CAPTURED = "captured"

    customer = models.CharField(max_length=100, unique=True)
    amount = models.DecimalField(max_digits=8, decimal_places=2)
    status = models.CharField(max_length=10, choices=Status, default=Status.OPEN)
    #: The highest fence that touched this row. Whoever comes with a lower one comes too late.
    captured_fence = models.BigIntegerField(default=0)

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
