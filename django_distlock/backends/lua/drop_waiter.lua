-- Forget who waits; of the last one, also that somebody does.
--
-- KEYS: waiters, and the listing where there is one. Answers: dropped
local waiters, listing = unpack(KEYS)

redis.call('ZREM', waiters, ARGV[1])
if redis.call('EXISTS', waiters) == 0 then
    remove(waiters, listing)
end
return 'dropped'
