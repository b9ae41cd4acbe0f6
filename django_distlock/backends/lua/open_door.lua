-- Let others share a key that a waiter to hold it alone has given up.
--
-- KEYS: record, sharers. ARGV: channel. Answers: opened | open
local lock, shared = unpack(KEYS)

if redis.call('HDEL', shared, 'closed') == 0 then
    return 'open'
end
wake(ARGV[1], lock)
return 'opened'
