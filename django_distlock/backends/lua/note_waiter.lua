-- Record a waiter for some seconds, for people to see.
--
-- KEYS: waiters, and the listing if there is one.
-- Answers: the waiter's note, by which it is recorded again, or dropped
local waiters, listing = unpack(KEYS)
local noted, seconds, who = unpack(ARGV)

-- Waiters that died.
forget_over(waiters)
if noted ~= '' then
    redis.call('ZREM', waiters, noted)
end
local since = string.match(noted, '^%d+') or text(now)
local note = since .. ' ' .. who
redis.call('ZADD', waiters, text(now + microseconds(seconds)), note)
local last = redis.call('ZRANGE', waiters, 0, 0, 'REV', 'WITHSCORES')[2]
remove_at(waiters, last)
list(listing, waiters, last)
return note
