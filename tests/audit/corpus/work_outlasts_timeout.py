import subprocess
import time
from datetime import timedelta

import redis
import requests
from django.core.cache import cache
from django_distlock import distlock

client = redis.Redis()
TIMEOUT = 10

class Feed:
    TIMEOUT = 10

    def request_that_may_take_longer(self):
        with client.lock("feed", timeout=self.TIMEOUT):  # bad: work-outlasts-timeout
            requests.get("https://example.org/feed", timeout=2 * TIMEOUT)

def released_in_finally():
    lock = client.lock("feed", timeout=10)
    if lock.acquire(blocking=False):
        try: subprocess.run(["fetch"], timeout=60, check=True)
        finally: lock.release()  # bad: work-outlasts-timeout

def with_a_cache(feed):
    if cache.add("feed-lock", 1, timedelta(seconds=10).seconds):
        try: time.sleep(60)  # missed: work-outlasts-timeout
        finally: cache.delete("feed-lock")  # bad: delete-without-token

def with_set():
    if client.set("feed-lock", "1", nx=True, px=10_000):
        try: time.sleep(2 * 30)
        finally: client.delete("feed-lock")  # bad: work-outlasts-timeout, delete-without-token

def unrenewed():
    with distlock("feed", ttl=10, heartbeat=False): time.sleep(15)  # bad: work-outlasts-timeout

def basic():
    with distlock("feed", ttl=10, basic=True): time.sleep(15)  # bad: work-outlasts-timeout

def lease_without_a_heartbeat():
    lease = distlock("feed", ttl=10).acquire()
    try: requests.post("https://example.org", timeout=10)
    finally: lease.release()  # bad: work-outlasts-timeout

def longest_of_two_ways(feed):
    with client.lock("feed", timeout=10):  # bad: work-outlasts-timeout
        if feed.is_large: time.sleep(20)
        else: time.sleep(1)

def released_in_a_line():
    lock = client.lock("feed", timeout=10)
    lock.acquire()
    time.sleep(60)  # missed: work-outlasts-timeout
    lock.release()

def work_that_says_nothing(feed):
    with client.lock("feed", timeout=1): feed.read_all_of_it()  # missed: work-outlasts-timeout

# What follows is right.

def in_time():
    with client.lock("feed", timeout=60): requests.get("https://example.org/feed", timeout=30)

def lease_with_a_heartbeat():
    lease = distlock("feed", ttl=10).acquire(heartbeat=True)
    try: requests.post("https://example.org", timeout=10)
    finally: lease.release()

def block_that_may_expire():
    with distlock("feed", ttl=10, heartbeat=False, on_lost="ignore"): time.sleep(15)

def renewed_by_hand():
    with client.lock("feed", timeout=10) as lock:
        time.sleep(6)
        lock.reacquire()
        time.sleep(6)

def only_defined():
    with client.lock("feed", timeout=10):

        def later(): time.sleep(60)

    return later

def timeouts_of_other_things(feed):
    with client.lock("feed", timeout=10):
        cache.set("feed", feed.text, timeout=3600)
        cache.get_or_set("feed", feed.text, timeout=3600)
