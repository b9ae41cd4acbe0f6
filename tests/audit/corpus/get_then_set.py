import os

import redis
from django.core.cache import cache
from django.db import transaction
from django_distlock import distlock, transaction_lock

client = redis.Redis()

def read_and_set(report):
    if cache.get("report-lock") == 1: return  # bad: get-then-set
    cache.set("report-lock", True, 60)

def set_where_it_was_not(report):
    if not cache.get(f"report-running:{report.pk}"):  # bad: get-then-set
        cache.set(f"report-running:{report.pk}", 1, 60)
        report.make()

def in_one_line(report):
    if not cache.get("report-lock"): cache.set("report-lock", 1)  # fmt: skip # bad: get-then-set

def key_without_a_word(report):
    if cache.get(f"report:{report.pk}"): return  # bad: get-then-set
    cache.set(f"report:{report.pk}", True, 60)
    report.make()
    cache.delete(f"report:{report.pk}")

def on_redis(report):
    if client.exists("report-lock"): return  # bad: get-then-set
    client.setex("report-lock", 60, "1")

def by_a_file(report):
    if os.path.exists("/run/report.lock"): return  # missed: get-then-set
    with open("/run/report.lock", "w") as file: file.write("1")

def until_it_is_free(report):
    while cache.get("report-lock"): report.wait()  # bad: get-then-set
    cache.set("report-lock", 1, 60)

def by_in(report):
    if "report-lock" not in cache:  # missed: get-then-set
        cache.set("report-lock", 1, 60)
        report.make()

def by_a_row(report):
    if report.is_running: return  # missed: get-then-set
    report.is_running = True
    report.save()

def once_an_hour(mail):
    if not cache.get("mail-was-sent"):  # missed: get-then-set
        mail.send()
        cache.set("mail-was-sent", True, 3600)

# What follows is right.

def cached(report):
    text = cache.get(f"report:{report.pk}")
    if text is None:
        text = report.make()
        cache.set(f"report:{report.pk}", text, 60)
    return text

def cached_answer(user):
    if cache.get(f"may-read:{user}"): return True
    cache.set(f"may-read:{user}", True, 60)
    return user.may_read()

def cached_flag(user):
    locked = cache.get(f"is-locked:{user.pk}")
    if locked is None:
        locked = user.profile.is_locked
        cache.set(f"is-locked:{user.pk}", locked, 60)
    return locked

def set_whatever_was_read(is_on, log):
    before = cache.get("maintenance-lock")
    if is_on and not before: log.info("locked")
    cache.set("maintenance-lock", is_on)

def taken_in_one_step(report):
    if not cache.add("report-lock", 1, 60): return cache.get("report-lock")
    cache.set("report-lock", 2, 60)
    return report.make()

def under_a_lock(report):
    with distlock("report"):
        if not cache.get("report-running"): cache.set("report-running", 1, 60)

@transaction.atomic
def under_a_lock_of_the_transaction(report):
    transaction_lock("report")
    if not cache.get("report-running"): cache.set("report-running", 1, 60)

def switched():
    if cache.get("site-lock"): cache.delete("site-lock")
    else: cache.set("site-lock", True)

def prolonged(token):
    if cache.get("report-lock") == token: cache.set("report-lock", token, 60)

def set_first(report):
    cache.set("report-lock", 1, 60)
    if cache.get("report-lock"): report.make()
