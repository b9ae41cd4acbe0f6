-- Let people see for so many seconds who waits.
--
-- KEYS: waiters, and the listing where there is one.
-- Answers: what the waiter is noted as, by which it is noted again, or no more
local waiters, listing = unpack(KEYS)
local noted, seconds, who = unpack(ARGV)

-- Those who died.
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
