"""Which view answers where: each under its own name."""

from __future__ import annotations

from django.urls import path

from . import views

urlpatterns = [
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
    )
]
