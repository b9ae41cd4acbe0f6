import time
import uuid

import redis
from django.core.cache import cache

client = redis.Redis()
LOCK = "import-lock"

def in_finally(feed):
    if not cache.add(key="import-lock", value=1, timeout=60): return
    try: feed.read()
    finally: cache.delete(key="import-lock")  # bad: delete-without-token

def key_without_a_word(feed):
    key = f"import:{feed.pk}"
    if cache.add(key, 1, 60):
        try: feed.read()
        finally: cache.delete(key)  # bad: delete-without-token

def on_redis(feed):
    if client.set("import-lock", "1", nx=True, ex=60):
        feed.read()
        client.delete("import-lock")  # bad: delete-without-token

class Importer:
    def __init__(self, feed): self.key = f"import-lock:{feed.pk}"

    def take(self): return cache.add(self.key, 1, 60)

    def give_back(self): cache.delete(self.key)  # bad: delete-without-token

def compared_by_a_second_command(feed):
    token = uuid.uuid4().hex
    if cache.add("compared-lock", token, 60):
        feed.read()
        if cache.get("compared-lock") == token:
            cache.delete("compared-lock")  # missed: delete-without-token

def take_lock(key): return cache.add(key, 1, 60)

def give_back_lock(key): cache.delete(key)  # missed: delete-without-token

# What follows is right, or as good as a cache allows.

def for_ever(feed):
    if cache.add("for-ever-lock", 1, None):
        feed.read()
        cache.delete("for-ever-lock")

def while_there_is_time(feed):
    until = time.monotonic() + 55
    if cache.add("timed-lock", 1, 60):
        feed.read()
        if time.monotonic() < until: cache.delete("timed-lock")

def by_a_script(feed, script):
    token = uuid.uuid4().hex
    if client.set("script-lock", token, nx=True, px=60_000):
        feed.read()
        script(keys=["script-lock"], args=[token])

def watched(token):
    with client.pipeline() as pipe:
        pipe.watch("import-lock")
        if pipe.get("import-lock") == token:
            pipe.multi()
            pipe.delete("import-lock")
            pipe.execute()

def mark_that_is_taken_back(mail):
    key = f"sent:{mail.pk}"
    if cache.add(key, 1, 60):
        try: mail.send()
        except OSError:
            cache.delete(key)
            raise

def force_unlock(): cache.delete("import-lock")
