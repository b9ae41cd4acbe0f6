"""`distlock.E002`, `W002` and `W009`: models whose rows refuse stale fences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core import checks

from ..backends.database import DatabaseBackend
from ..fencing import FencedModel, FencedQuerySet
from ..fencing.keys import KeyTemplate
from .configured import DOCS, check_each, where
from .routers import written_to


@checks.register("distlock")
def check_fence_keys(
    app_configs: Sequence[AppConfig] | None, **_: Any
) -> list[checks.CheckMessage]:
    """E002: the `fence_key` of a model only uses its columns."""
    found: list[checks.CheckMessage] = []
    for model in _fenced_models(app_configs):
        if model.fence_key is None:
            continue
        try:
            KeyTemplate(model, model.fence_key)
        except (ValueError, TypeError) as error:
            found.append(
                checks.Error(f"fence_key: {error}", hint=DOCS, obj=model, id="distlock.E002")
            )
    return found


@checks.register("distlock")
def check_base_managers(
    app_configs: Sequence[AppConfig] | None, **_: Any
) -> list[checks.CheckMessage]:
    """W009: `fence_required` does not refuse what Django writes when it deletes a related row."""
    return [
        checks.Warning(
            f"{model.__name__} has fence_required, and its base manager is fenced: no row that"
            f" {field.name!r} (on_delete=SET_NULL or SET()) refers to can be deleted.",
            hint=f"Remove base_manager_name. {DOCS}",
            obj=model,
            id="distlock.W009",
        )
        for model in _fenced_models(app_configs)
        if model.fence_required and _is_fenced(model._base_manager)
        for field in model._meta.concrete_fields
        # Django updates such rows by a query; the others it collects first.
        if field.remote_field and getattr(field.remote_field.on_delete, "lazy_sub_objs", False)
    ]


@check_each(DatabaseBackend)
def check_fence_floor(backend: DatabaseBackend) -> Iterator[checks.CheckMessage]:
    """W002: FENCE_FLOOR is set, because rows outlive counters lost by a failover or a restore."""
    # No failover during development.
    if backend.config.fence_floor is None and not settings.DEBUG and _fenced_models(None):
        yield checks.Warning(
            f"{where(backend)} has no FENCE_FLOOR, but there are fenced models. After a failover"
            " or a restore that loses the latest grants, new leases would get fences that were"
            " already written to rows.",
            hint=f"Set FENCE_FLOOR to 'clock'. {DOCS}",
            id="distlock.W002",
        )


def fenced_models_in(using: str) -> list[type[FencedModel]]:
    """Return the models whose rows refuse stale fences and are written to a database."""
    return [model for model in _fenced_models(None) if written_to(model) == using]


def _is_fenced(manager: Any) -> bool:
    return issubclass(manager._queryset_class, FencedQuerySet)


def _fenced_models(app_configs: Sequence[AppConfig] | None) -> list[type[FencedModel]]:
    configs = apps.get_app_configs() if app_configs is None else app_configs
    return [
        model
        for config in configs
        for model in config.get_models()
        if issubclass(model, FencedModel)
    ]
