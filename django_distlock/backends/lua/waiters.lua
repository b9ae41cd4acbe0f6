-- Read who waits.
--
-- KEYS: waiters. Answers: notes, each with its end behind it, as JSON
local found = redis.call(
    'ZRANGE', KEYS[1], '(' .. text(now), '+inf', 'BYSCORE', 'LIMIT', 0, ARGV[1], 'WITHSCORES'
)
return found[1] and cjson.encode(found) or '[]'
