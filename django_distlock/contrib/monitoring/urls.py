"""The URLs of the endpoints, for `include()` under a path of the project."""

from __future__ import annotations

from django.urls import path

from . import views

app_name = "distlock_monitoring"
urlpatterns = [
    path("health", views.health_view, name="health"),
    path("stats.json", views.stats_view, name="stats"),
    path("metrics", views.metrics_view, name="metrics"),
]
