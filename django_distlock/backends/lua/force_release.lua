-- Force-release a key: its holder's fence is passed in the same step.
--
-- KEYS: record, fence, who shares the key, and the listing where there is one.
-- Answers: held now record | overflow | free
local lock, fence, shared, listing = unpack(KEYS)
local maximum, channel, seen = unpack(ARGV)

local free_at, wanted = unpack(redis.call('HMGET', lock, 'free_at', 'wanted'))
if not free_at or not is_live(free_at) or not is_seen(lock, seen) then
    return 'free'
end
local moved = next_fence(fence)
if moved > tonumber(maximum) then
    return 'overflow'
end
local record = described(lock)
-- First: a server without memory lets a script go on that began with a write that takes none.
remove(lock, listing)
redis.call('SET', fence, text(moved))
if whole(lock) ~= lock then
    drop_place(shared, lock)
end
if wanted then
    wake(channel, lock)
end
return 'held ' .. text(now) .. ' ' .. record
