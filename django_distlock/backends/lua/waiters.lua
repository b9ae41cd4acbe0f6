-- Read the waiters of a key.
--
-- KEYS: waiters. Answers: notes, each followed by its end, as JSON
local found = redis.call(
    'ZRANGE', KEYS[1], '(' .. text(now), '+inf', 'BYSCORE', 'LIMIT', 0, ARGV[1], 'WITHSCORES'
)
return found[1] and cjson.encode(found) or '[]'
