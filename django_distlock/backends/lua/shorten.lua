-- Let a record end in so many seconds at the latest; it never gets longer.
--
-- KEYS: record; where tokens are indexed, that of the token.
-- Answers: held now record | free
local lock, index = unpack(KEYS)
local seconds, grace, token, channel = unpack(ARGV)

local held = redis.call('HMGET', lock, 'free_at', 'expires_at', 'wanted')
local free_at, settled = held[1], held[1] == held[2] and held[1] ~= ''
if not free_at or not is_live(free_at) or token ~= '' and refused(lock, token) then
    return 'free'
end
local sooner, sooner_free = lease_ends(seconds, settled and 0 or grace)
if not is_sooner(sooner_free, free_at) then
    return 'held ' .. text(now) .. ' ' .. described(lock)
end
begin(lock)
redis.call('HSET', lock, 'expires_at', sooner, 'free_at', sooner_free)
-- Before it may go at once.
local record = described(lock)
remove_at(lock, sooner_free)
if index then
    remove_at(index, sooner_free)
end
if held[3] then
    wake(channel, lock)
end
return 'held ' .. text(now) .. ' ' .. record
