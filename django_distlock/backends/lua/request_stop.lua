-- Ask the holder to finish.
--
-- KEYS: record. Answers: held now record | free
local lock, seen = KEYS[1], ARGV[1]

local free_at = redis.call('HGET', lock, 'free_at')
if not free_at or not is_live(free_at) or not is_seen(lock, seen) then
    return 'free'
end
redis.call('HSETNX', lock, 'stop_requested_at', text(now))
return 'held ' .. text(now) .. ' ' .. described(lock)
