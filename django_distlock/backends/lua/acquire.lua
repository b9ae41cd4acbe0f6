-- Grant a key if it is free.
--
-- KEYS: record, fence, pause, sharers; if they are used, the listing, and the indexes of the token
-- and of the replaced one.
-- Answers: granted fence now expires_at | contended now [record] | paused now [record] | duplicate
-- | overflow | shared (call `share`) | free (with `look`: it would be granted)
local lock, fence, pause, shared, listing, index, replaced = unpack(KEYS)
local token, ttl, grace, maximum, key, holder, wanted, replace, channel, _, _, look = unpack(ARGV)

local held = redis.call('HMGET', lock, 'token', 'free_at', 'wanted', 'expires_at')
local live = held[1] and is_live(held[2])
local paused = now < tonumber(redis.call('HGET', pause, 'until') or '0')
-- A token that replaces itself does not get what it has settled.
local spent = replace == token and held[2] ~= '' and held[2] == held[4]
if paused or live and (held[1] ~= replace or spent) then
    local outcome = (paused and 'paused ' or 'contended ') .. text(now)
    if not live then
        return outcome
    end
    if wanted == '1' then
        redis.call('HSETNX', lock, 'wanted', '1')
    end
    return outcome .. ' ' .. described(lock)
end
if redis.call('EXISTS', shared) == 1 then
    return 'shared'
end
local indexed = index and redis.call('GET', index)
if indexed and indexed ~= lock then
    return 'duplicate'
end
local granted = next_fence(fence)
if granted > tonumber(maximum) then
    return 'overflow'
end
if look then
    return 'free'
end
-- The fence first: if a later step failed, the fence would only be skipped.
redis.call('SET', fence, text(granted))
local asked = live and passed_on({lock}, holder)
if held[1] then
    redis.call('DEL', lock)
end
if replaced and held[1] == replace then
    redis.call('DEL', replaced)
end
local expires_at = put_record(lock, listing, index, key, token, granted, ttl, grace, holder)
pass_on(lock, asked)
if live and held[3] then
    -- The waiters have to mark this grant.
    wake(channel, lock)
end
return 'granted ' .. text(granted) .. ' ' .. text(now) .. ' ' .. expires_at
