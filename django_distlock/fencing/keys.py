"""The key that a row belongs to: `fence_key = "payment:{pk}"`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from string import Formatter
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models

from ..core.errors import LockUsageError
from ..core.keys import normalize_key
from .fields import FENCE

_ANY, _NUMBER = ".*", r"-?\d+"
#: The pattern of each type of field that a key can contain: its values have one text each.
_PATTERNS: Mapping[type[models.Field[Any, Any]], str] = {
    models.IntegerField: _NUMBER,
    models.UUIDField: r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    models.DateField: r"\d{4}-\d\d-\d\d",
    models.CharField: _ANY,
    models.TextField: _ANY,
}
#: Separators that could be a part of a number, by the fields around them: then the key could be
#: split in several ways.
_UNCLEAR = {(_ANY, _NUMBER): r"[-\d]+", (_NUMBER, _ANY): r"\d+", (_NUMBER, _NUMBER): r"\d+"}
#: No field has this integer, or a higher one.
_MOST = 2**63


class KeyTemplate:
    """The key of a model's rows, with the names of its columns in braces.

    Args:
        text: Such as `"payment:{pk}"` or `"{tenant_id}:payment:{pk}"`.

    Raises:
        ValueError: The text names no column, or an unknown one, or a key could not be split into
            its columns in one way only.
    """

    def __init__(self, model: type[models.Model], text: str):
        self.text = text
        #: By the name in the braces: the attribute, and the field that parses its values.
        self._fields: dict[str, tuple[str, models.Field[Any, Any]]] = {}
        pattern, texts, before = "", 0, ""
        for literal, name, spec, conversion in Formatter().parse(text):
            pattern += re.escape(literal)
            if name is None:
                continue
            if self._fields and not literal:
                raise ValueError(f"{text!r}: nothing separates {{{name}}} from the previous field.")
            if spec or conversion or name in self._fields:
                raise ValueError(f"{text!r}: {{{name}}} must occur once, without a format.")
            column = _column(model, name, text)
            values = column
            while values.remote_field is not None:
                values = values.target_field  # type: ignore[attr-defined]
            self._fields[name] = column.attname, values
            part = next((_PATTERNS[each] for each in _PATTERNS if isinstance(values, each)), None)
            if part is None or isinstance(values, models.DateTimeField):
                raise ValueError(
                    f"{text!r}: {{{name}}} is a {type(values).__name__}, whose values have no"
                    " single text. A key can contain integers, UUIDs, dates and texts."
                )
            if re.fullmatch(_UNCLEAR.get((before, part), "(?!)"), literal):
                raise ValueError(f"{text!r}: {literal!r} may be a part of the number beside it.")
            texts += part == _ANY
            pattern += f"({part})"
            before = part
        if not self._fields:
            raise ValueError(f"{text!r} names no field, so all rows would have the same key.")
        if texts > 1:
            raise ValueError(
                f"{text!r}: {texts} of its fields can hold any text, so a key could be split in"
                " several ways."
            )
        self._pattern = re.compile(pattern, re.DOTALL)

    def of(self, instance: models.Model) -> str | None:
        """Return the key of a row; None: not known, because a field has no value yet."""
        values = self.values(instance)
        if None in values.values():
            return None
        named = {name: values[attname] for name, (attname, _field) in self._fields.items()}
        return normalize_key(self.text.format(**named))

    def values(self, instance: models.Model) -> dict[str, Any]:
        """Return a row's values in the columns of its key; None: the database will compute it."""
        found = {}
        for attname, field in self._fields.values():
            value = getattr(instance, attname)
            is_told = not hasattr(value, "resolve_expression")
            found[attname] = field.to_python(value) if is_told else None
        return found

    def columns(self, key: str) -> dict[str, Any] | None:
        """Return the values that rows of this key have in their columns; None: no row has it."""
        found = self._pattern.fullmatch(key)
        if found is None:
            return None
        try:
            values = {
                name: values.to_python(part)
                for (name, (_, values)), part in zip(
                    self._fields.items(), found.groups(), strict=True
                )
            }
        except ValidationError:
            return None
        if any(isinstance(value, int) and abs(value) >= _MOST for value in values.values()):
            return None
        if normalize_key(self.text.format(**values)) != key:
            return None  # Such as a number with a leading zero.
        return {self._fields[name][0]: value for name, value in values.items()}


def _column(model: type[models.Model], name: str, text: str) -> models.Field[Any, Any]:
    if name == "pk":
        field: Any = model._meta.pk
    else:
        named = (each for each in model._meta.fields if name in (each.name, each.attname))
        field = next(named, None)
    if field is None or not field.column:
        raise ValueError(f"{text!r}: {model.__name__} has no column {{{name}}}.")
    fence = next((each for each in model._meta.fields if each.name == FENCE), field)
    if field.model is not fence.model and not (
        field.primary_key and _is_one_key(model, fence.model) and _is_one_key(model, field.model)
    ):
        raise ValueError(f"{text!r}: {{{name}}} is in another table than the fence.")
    return field  # type: ignore[no-any-return]


def _is_one_key(model: type[models.Model], parent: type[models.Model]) -> bool:
    """Whether a row and that of a parent have the same primary key: a model may have two."""
    links: Any = model._meta.get_path_to_parent(parent)
    return all(link.join_field.primary_key for link in links)


@cache
def template_of(model: type[models.Model]) -> KeyTemplate | None:
    """Return the template of a fenced model; None: its rows may be written under any key."""
    text = getattr(model, "fence_key", None)
    if text is None:
        return None
    try:
        return KeyTemplate(model, text)
    except ValueError as error:
        raise LockUsageError(f"{model.__name__}.fence_key: {error}") from None
