import time

import redis
from django.core.cache import cache, caches
from django_distlock import distlock
from django_distlock.compat.redis import Lock

client = redis.Redis()
locks = caches["locks"]

def without_a_look(report): cache.add("report-lock", 1, 60)  # bad: acquire-ignored

def on_redis(report): client.set("report-lock", "1", nx=True, ex=60)  # bad: acquire-ignored

async def awaited(report): await cache.aadd("report-lock", 1, 60)  # bad: acquire-ignored

def assigned_and_forgotten(report):
    acquired = cache.add("report-lock", 1, 60)  # bad: acquire-ignored

def take_report_lock(): return cache.add("report-lock", 1, 60)

def by_a_helper(report): take_report_lock()  # missed: acquire-ignored

def of_a_lock_object(report):
    lock = client.lock("report", timeout=60)
    lock.acquire(blocking=False)  # bad: acquire-ignored

def of_a_class_that_took_its_place(report):
    Lock(None, "report", 60).acquire(blocking=False)  # bad: acquire-ignored

def of_ours(report): distlock("report").try_acquire()  # bad: acquire-ignored

def left_to_the_block(report):
    with distlock("report", wait=0, on_conflict="yield"):  # bad: acquire-ignored
        report.make()

def read_before(report):
    if not cache.get("report-lock"):
        cache.add("report-lock", 1, 60)  # bad: acquire-ignored
        report.make()

def logged_only(report, log):
    acquired = cache.add("report-lock", 1, 60)  # missed: acquire-ignored
    log.info("acquired: %s", acquired)

# What follows is right.

def looked_at(report):
    if not cache.add("report-lock", 1, 60): return

def looked_at_later(report):
    acquired = cache.add("report-lock", 1, 60)
    if acquired: report.make()

def default_of_a_counter(user):
    cache.add(f"hits:{user}", 0, 3600)
    return cache.incr(f"hits:{user}")

def plain_value(page): cache.add(f"page:{page.pk}", page.html)

def set_of_names(locked_cache, name): locked_cache.add(name)

def blocks_of_a_file(block_cache, block): block_cache.add(block.number, block)

def read_back(token):
    cache.add("report-lock", token, 60)
    return cache.get("report-lock") == token

def that_looks(report):
    with distlock("report", wait=0, on_conflict="yield") as lease:
        if lease: report.make()

def probed():
    cache.add("report-lock", 1, 60)
    assert not cache.add("report-lock", 1, 60)

def that_waits_or_raises(report):
    lock = client.lock("report")
    lock.acquire()

def told_to_the_caller(): return take_report_lock()
