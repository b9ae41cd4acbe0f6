-- Let a lease expire `ttl` seconds from now.
--
-- KEYS: record; of a sharer, the sharers of its key; if they are used, the listing, and the index of
-- the token.
-- Answers: extended fence acquired_at stop_requested(0 or 1) expires_at | why not
local lock = KEYS[1]
local shared = whole(lock) ~= lock and KEYS[2]
local listing, index = unpack(KEYS, shared and 3 or 2)
local token, ttl, grace, channel = unpack(ARGV)

local why_not, before, wanted = refused(lock, token)
if why_not then
    return why_not
end
local last = redis.call('HGET', lock, 'renewed_until')
if last and now >= tonumber(last) then
    return 'shortened'
end
local expires_at, free_at = lease_ends(ttl, grace)
local ends = last and not is_sooner(expires_at, last) and last or expires_at
begin(lock)
redis.call('HSET', lock, 'ttl', ttl, 'renewed_at', text(now), 'expires_at', ends, 'free_at', free_at)
remove_at(lock, free_at)
if shared then
    keep_name(shared, lock, free_at)
end
if index then
    redis.call('SET', index, lock)
    remove_at(index, free_at)
end
list(listing, lock, free_at)
if wanted and is_sooner(free_at, before) then
    wake(channel, lock)
end
local kept = redis.call('HMGET', lock, 'fence', 'acquired_at', 'stop_requested_at')
return 'extended ' .. kept[1] .. ' ' .. kept[2] .. ' ' .. (kept[3] and '1 ' or '0 ') .. expires_at
