"""Addresses of the example."""

from django.contrib import admin
from django.urls import include, path

from shop import views

urlpatterns = [
    path("", views.start, name="start"),
    path("payments/<int:pk>/capture/", views.capture, name="capture"),
    path("payments/<int:pk>/later/", views.capture_later, name="later"),
    path("payments/<int:pk>/pause/", views.pause, name="pause"),
    path("products/<int:pk>/sell/", views.sell, name="sell"),
    path("admin/", admin.site.urls),
    # For whoever watches over the locks: health, stats.json, metrics.
    path("locks/", include("django_distlock.contrib.monitoring.urls")),
]
