from celery import shared_task
from django.core.management.base import BaseCommand
from django.db import transaction
from django.shortcuts import get_object_or_404
from django.utils.decorators import method_decorator
from django_distlock import transaction_locked
from shop.models import Order

def view(request, pk):
    order = Order.objects.select_for_update().get(pk=pk)  # bad: select-for-update-outside-atomic
    order.save()

class View:
    def post(self, request, pk):
        orders = Order.objects.filter(pk=pk)
        get_object_or_404(orders.select_for_update(), pk=pk)  # bad: select-for-update-outside-atomic

@shared_task
def task(pk):
    order = Order.objects.select_for_update().first()  # bad: select-for-update-outside-atomic
    order.save()

class Command(BaseCommand):
    def handle(self, **options):
        for order in Order.objects.select_for_update():  # bad: select-for-update-outside-atomic
            order.save()

class ViewSet:
    def create(self, request):
        order = Order.objects.select_for_update().latest()  # bad: select-for-update-outside-atomic
        order.save()

def read_too_early(pk):
    order = Order.objects.select_for_update().get(pk=pk)  # bad: select-for-update-outside-atomic
    with transaction.atomic(): order.save()

def saved_too_late(pk):
    with transaction.atomic():
        order = Order.objects.select_for_update().get(pk=pk)  # bad: select-for-update-outside-atomic
    order.number += 1
    order.save()

def helper(pk):
    return Order.objects.select_for_update().get(pk=pk)  # missed: select-for-update-outside-atomic

# What follows is right.

@transaction.atomic
def view_with_a_decorator(request, pk):
    order = Order.objects.select_for_update().get(pk=pk)
    order.save()

@atomic_with_retries(3)
def view_with_a_decorator_of_its_own(request, pk):
    return Order.objects.select_for_update().get(pk=pk)

@transaction_locked("order:{pk}")
def with_ours(request, pk): return Order.objects.select_for_update().get(pk=pk)

class RightView:
    def get_queryset(self): return Order.objects.select_for_update()

    @method_decorator(transaction.atomic)
    def post(self, request, pk): return Order.objects.select_for_update().get(pk=pk)

@shared_task
def lazy_task(pk):
    orders = Order.objects.select_for_update()
    with transaction.atomic():
        for order in orders.filter(pk=pk): order.save()

def saved_in_time(pk):
    with transaction.atomic():
        order = Order.objects.select_for_update().get(pk=pk)
        order.save()
    return order.number

def another_row(pk, checkout):
    with transaction.atomic(): order = Order.objects.select_for_update().get(pk=pk)
    order = checkout.order
    order.save()

@transaction.atomic
def savepoint(pk):
    with transaction.atomic(): order = Order.objects.select_for_update().get(pk=pk)
    order.save()
