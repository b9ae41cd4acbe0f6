"""The tables of the shop."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib.contenttypes.fields import GenericForeignKey, GenericRelation
from django.contrib.contenttypes.models import ContentType
from django.db import models

from django_distlock.fencing import FencedModel, FencedQuerySet, FenceField


class Row(models.Model):
    """Something that competing processes read, change and write back."""

    name = models.CharField(max_length=100)
    value = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


class Account(FencedModel):
    """The same, and it refuses who comes too late."""

    objects: ClassVar[Any] = FencedQuerySet.as_manager()

    name = models.CharField(max_length=100)
    value = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


class Vault(FencedModel):
    """Each row belongs to a key, and nobody writes it without a lease of that."""

    fence_key = "vault:{pk}"
    fence_required = True

    objects: ClassVar[Any] = FencedQuerySet.as_manager()

    value = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.pk}={self.value}"


class Folder(FencedModel):
    """Belongs to the key of its tenant, which is a column like others."""

    fence_key = "tenant:{tenant}"

    objects: ClassVar[Any] = FencedQuerySet.as_manager()

    tenant = models.IntegerField(db_default=1)
    # Behind the column of the key, as an abstract base of a project's own may put it.
    fence = FenceField()
    value = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.tenant}/{self.pk}={self.value}"


class Ledger(Account):
    """An account by another name, in the same table."""

    class Meta:
        app_label = "shop"
        proxy = True


class Savings(Account):
    """An account whose fence is in its parent's table."""

    interest = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"


class Plain(models.Model):
    """A table that knows nothing of fences."""

    value = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.pk}={self.value}"


class Deep(Plain, FencedModel):
    """Its fence is in its own table, and the value in its parent's."""

    objects: ClassVar[Any] = FencedQuerySet.as_manager()

    class Meta:
        app_label = "shop"


class SubVault(Vault):
    """Belongs to the key that its parent's primary key makes."""

    more = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"


class Named(FencedModel):
    """Belongs to a key of text, and has columns that look like a fence."""

    fence_key = "n:{name}"

    objects: ClassVar[Any] = FencedQuerySet.as_manager()

    fence = FenceField(db_column="the_fence")
    name = models.CharField(max_length=100, unique=True)
    fence_note = models.CharField(max_length=100, default="")
    value = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


# `Entry.objects` is Any, and so is the manager that Django derives from it.
class Shelf(models.Model):  # type: ignore[django-manager-missing]
    """What rows that refuse stale fences are put on: by a foreign key, and by a generic one."""

    notes = GenericRelation("Entry", "number", "kind")

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.pk}"


class Entry(FencedModel):
    """A row that a manager of another row's relation writes."""

    objects: ClassVar[Any] = FencedQuerySet.as_manager()

    shelf = models.ForeignKey(Shelf, models.CASCADE, null=True, related_name="entries")
    # Its table may be made before that of the types.
    kind = models.ForeignKey(ContentType, models.CASCADE, null=True, db_constraint=False)
    number = models.BigIntegerField(null=True)
    noted = GenericForeignKey("kind", "number")
    value = models.IntegerField(default=0)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.pk}={self.value}"
