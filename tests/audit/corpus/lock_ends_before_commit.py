import redis
import requests
from django.core.cache import cache
from django.db import transaction
from django.db.transaction import atomic
from django_distlock import distlock
from django_distlock.compat import pglock as compat
from django_distlock.compat.redis import Lock
from pglock import advisory
from shop.models import Order

client = redis.Redis()

@transaction.atomic
def decorated(pk):
    with client.lock(f"order:{pk}"):  # bad: lock-ends-before-commit
        order = Order.objects.get(pk=pk)
        order.number += 1
        order.save()

def in_one_line(order):
    with atomic(), client.lock("orders"): order.save()  # bad: lock-ends-before-commit

def released_in_finally(order):
    with transaction.atomic():
        lock = client.lock("orders")
        lock.acquire()
        try: order.save()
        finally: lock.release()  # bad: lock-ends-before-commit

@atomic(using="orders")
def by_a_cache(pk):
    if cache.add("order-lock", 1, None):
        try: Order.objects.filter(pk=pk).update(number=1)
        finally: cache.delete("order-lock")  # bad: lock-ends-before-commit

@transaction.atomic
def of_a_session(order):
    with advisory("orders"): order.save()  # bad: lock-ends-before-commit

@transaction.atomic
def in_a_function_of_the_file(order):
    with client.lock("orders"): count(order)  # bad: lock-ends-before-commit

def count(order):
    order.number += 1
    order.save()

@transaction.atomic
def decorated_inside():
    @advisory("orders")  # bad: lock-ends-before-commit
    def inner(order): order.save()

    return inner

@transaction.atomic
def in_a_function_of_another_file(order, counting):
    with client.lock("orders"): counting.count(order)  # missed: lock-ends-before-commit

# What follows is right.

def around_it(order):
    with client.lock("orders"), transaction.atomic(): order.save()

def around_a_block(order):
    with client.lock("orders"):
        with transaction.atomic(): order.save()

@transaction.atomic
def ours(order):
    with distlock("orders"): order.save()

@transaction.atomic
def ours_by_other_names(order):
    with compat.advisory("orders"): order.save()
    with Lock(None, "orders", 60): order.save()

@transaction.atomic
def ends_with_the_transaction(order):
    with advisory("orders", xact=True): order.save()

@transaction.atomic
def about_something_else(order):
    order.save()
    with client.lock("service"):
        requests.post("https://example.org", timeout=5)
        cache.delete("orders")

@transaction.atomic
def released_behind_it(order):
    lock = client.lock("orders")
    lock.acquire()
    order.save()
    transaction.on_commit(lock.release)
