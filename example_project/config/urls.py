"""Addresses of the example."""

from django.contrib import admin
from django.urls import path

from shop import views

urlpatterns = [
    path("", views.start, name="start"),
    path("payments/<int:pk>/capture/", views.capture, name="capture"),
    path("products/<int:pk>/sell/", views.sell, name="sell"),
    path("admin/", admin.site.urls),
]
