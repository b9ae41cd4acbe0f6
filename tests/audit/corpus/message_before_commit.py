import redis
from django.db import transaction
from django_distlock import distlock, transaction_lock, transaction_locked
from shop.models import Order
from shop.tasks import notify

client = redis.Redis()

def under_a_lock(order):
    with distlock("orders"), transaction.atomic():
        order.save()
        notify.delay(order.pk)  # bad: message-before-commit

@transaction.atomic
def inside_of_it(order):
    with distlock("orders"): order.save()
    notify.apply_async((order.pk,))  # bad: message-before-commit

@transaction.atomic
def under_a_row(pk):
    order = Order.objects.select_for_update().get(pk=pk)
    order.save()
    notify.delay(order.pk)  # bad: message-before-commit

@transaction.atomic
def under_a_transaction_lock(order, app):
    transaction_lock("orders")
    order.save()
    app.send_task("shop.tasks.notify", (order.pk,))  # bad: message-before-commit

@transaction_locked("orders")
def decorated(order):
    order.save()
    notify.enqueue(order.pk)  # bad: message-before-commit

def by_redis(order):
    with client.lock("orders"):
        with transaction.atomic():
            order.save()
            notify.delay(order.pk)  # bad: message-before-commit

@transaction.atomic
def in_a_function_of_the_file(order):
    with distlock("orders"):
        order.save()
        tell(order)  # missed: message-before-commit

def tell(order): notify.delay(order.pk)

def of_something_else(order, animation):
    with distlock("orders"), transaction.atomic():
        animation.delay(5)  # false: message-before-commit

# What follows is right.

def at_the_commit(order):
    with distlock("orders"), transaction.atomic():
        order.save()
        transaction.on_commit(lambda: notify.delay(order.pk))

def behind_it(order):
    with distlock("orders"):
        with transaction.atomic(): order.save()
        notify.delay(order.pk)

def by_celery(order):
    with distlock("orders"), transaction.atomic():
        order.save()
        notify.delay_on_commit(order.pk)

@transaction.atomic
def without_a_lock(order):
    """Too early, too, but no matter of locks."""
    order.save()
    notify.delay(order.pk)
