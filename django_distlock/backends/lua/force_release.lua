-- Force-release a key, and raise its fence above the holder's in the same step.
--
-- KEYS: record, fence, sharers, and the listing if there is one.
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
-- First: a server without free memory lets a script go on if its first write needs none.
remove(lock, listing)
redis.call('SET', fence, text(moved))
if whole(lock) ~= lock then
    drop_place(shared, lock)
end
if wanted then
    wake(channel, lock)
end
return 'held ' .. text(now) .. ' ' .. record
