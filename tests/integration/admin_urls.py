"""Addresses of a project with Django's admin. It can be imported where the admin is installed."""

from django.contrib import admin
from django.urls import path

from django_distlock.admin import FenceCounterAdmin, LockDashboard, LockEventAdmin
from django_distlock.models import FenceCounter, HeldLock, LockEvent

#: What some projects have beside the usual one.
operators = admin.AdminSite(name="operators")
operators.register(HeldLock, LockDashboard)
operators.register(FenceCounter, FenceCounterAdmin)
operators.register(LockEvent, LockEventAdmin)

#: One that shows nothing but what is held.
alone = admin.AdminSite(name="alone")
alone.register(HeldLock, LockDashboard)

urlpatterns = [
    path("admin/", admin.site.urls),
    path("operators/", operators.urls),
    path("alone/", alone.urls),
]
