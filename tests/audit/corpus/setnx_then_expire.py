import redis

client = redis.Redis()

def two_commands(feed):
    if client.setnx("import-lock", "1"):  # bad: setnx-then-expire
        client.expire("import-lock", 60)
        feed.read()

def with_set(feed):
    if client.set("import-lock", "1", nx=True):  # bad: setnx-then-expire
        client.expire("import-lock", 60)
        feed.read()

def deleted_as_well(feed):
    if client.setnx("import-lock", "1"):  # bad: setnx-then-expire
        client.expire("import-lock", 60)
        try: feed.read()
        finally: client.delete("import-lock")  # bad: delete-without-token

async def awaited(connection, feed):
    if await connection.setnx("import-lock", "1"):  # bad: setnx-then-expire
        await connection.expire("import-lock", 60)
        await feed.aread()

def until_a_time(feed):
    if client.setnx("import-lock", "1"):  # bad: setnx-then-expire
        client.expireat("import-lock", feed.ends_at)
        feed.read()

def expire_in_a_helper(feed):
    if client.setnx("import-lock", "1"):  # missed: setnx-then-expire
        limit("import-lock")
        feed.read()

def limit(key): client.expire(key, 60)

# What follows is right.

def repaired(feed):
    if client.set("repaired-lock", "1", nx=True, ex=60): feed.read()
    elif client.ttl("repaired-lock") == -1: client.expire("repaired-lock", 60)

def one_command(feed):
    if client.set("one-lock", "1", nx=True, ex=60): feed.read()

def one_transaction(feed):
    pipe = client.pipeline(transaction=True)
    pipe.setnx("feed", feed.text)
    pipe.expire("feed", 60)
    pipe.execute()

def limit_of_a_counter(user):
    if client.setnx(f"hits:{user}", 0): client.expire(f"hits:{user}", 60)
    return client.incr(f"hits:{user}")

def renewed(feed, token):
    if client.set("renewed-lock", token, nx=True, ex=60):
        feed.read_half()
        client.expire("renewed-lock", 60)
        feed.read_half()
