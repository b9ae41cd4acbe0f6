-- Let people see for so many seconds who waits.
--
-- KEYS: waiters. Answers: what the waiter is noted as, by which it is noted again, or no more
local waiters = KEYS[1]
local noted, seconds, who = unpack(ARGV)

-- Those who died, a bounded number of them at a time.
local over = redis.call('ZRANGE', waiters, '-inf', text(now), 'BYSCORE', 'LIMIT', 0, 100)
if over[1] then
    redis.call('ZREM', waiters, unpack(over))
end
if noted ~= '' then
    redis.call('ZREM', waiters, noted)
end
local since = string.match(noted, '^%d+') or text(now)
local note = since .. ' ' .. who
redis.call('ZADD', waiters, text(now + microseconds(seconds)), note)
remove_at(waiters, redis.call('ZRANGE', waiters, 0, 0, 'REV', 'WITHSCORES')[2])
return note
