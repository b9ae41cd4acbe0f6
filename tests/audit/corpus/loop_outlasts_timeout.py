import itertools
import time

import redis
import requests
from django.core.cache import cache
from django_distlock import distlock

client = redis.Redis()

def counted_passes():
    with client.lock("feed", timeout=60):  # bad: loop-outlasts-timeout
        for _ in range(30): time.sleep(5)

def rows(feeds):
    with client.lock("feed", timeout=60):  # bad: loop-outlasts-timeout
        for feed in feeds: requests.get(feed.url, timeout=30)

def for_ever(queue):
    lock = client.lock("leader", timeout=60)
    lock.acquire()
    try:
        while True:
            queue.step()
            time.sleep(1)
    finally: lock.release()  # bad: loop-outlasts-timeout

def until_something_happens(job):
    with cache.lock("job", timeout=30):  # bad: loop-outlasts-timeout
        while not job.is_done(): time.sleep(5)

def unrenewed(feeds):
    with distlock("feed", ttl=30, heartbeat=False):  # bad: loop-outlasts-timeout
        for feed in feeds: requests.get(feed.url, timeout=30)

def comprehension(feeds):
    with client.lock("feed", timeout=60):  # missed: loop-outlasts-timeout
        return [requests.get(feed.url, timeout=30) for feed in feeds]

def few_passes(shards):
    with client.lock("feed", timeout=120):  # false: loop-outlasts-timeout
        for shard in shards: requests.get(shard.url, timeout=30)

# What follows is right.

def few_rows():
    with client.lock("feed", timeout=60):
        for url in ("https://a.example", "https://b.example"): requests.get(url, timeout=20)

def renewed_in_each_pass(feeds):
    with client.lock("feed", timeout=60) as lock:
        for feed in feeds:
            requests.get(feed.url, timeout=30)
            lock.extend(60, replace_ttl=True)

def until_a_time(job):
    until = time.monotonic() + 50
    with client.lock("job", timeout=60):
        while time.monotonic() < until and not job.is_done(): time.sleep(20)

def renewed(queue):
    with distlock("leader", ttl=30) as lease:
        while True:
            lease.check()
            queue.step()
            time.sleep(5)

def lock_in_each_pass(feeds):
    for feed in feeds:
        with client.lock(f"feed:{feed.pk}", timeout=60): requests.get(feed.url, timeout=30)
