"""Which view answers where: each under its own name."""

from __future__ import annotations

from django.urls import URLPattern, URLResolver, include, path

from . import greenlets, views

urlpatterns: list[URLPattern | URLResolver] = [
    path(view.__name__, view)
    for view in (
        views.ready,
        views.worker,
        views.count,
        views.hold,
        views.leave,
        views.acount,
        views.ahold,
        views.await_alone,
        views.give_up,
        greenlets.keep,
        greenlets.take,
        greenlets.starve,
    )
]
urlpatterns.append(path("locks/", include("django_distlock.contrib.monitoring.urls")))
