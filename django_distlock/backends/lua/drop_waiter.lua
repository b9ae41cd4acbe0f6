-- Remove a waiter; with the last one, also the key from the listing.
--
-- KEYS: waiters, and the listing if there is one. Answers: dropped
local waiters, listing = unpack(KEYS)

redis.call('ZREM', waiters, ARGV[1])
if redis.call('EXISTS', waiters) == 0 then
    remove(waiters, listing)
end
return 'dropped'
