-- Request a stop, and let the holder renew for some seconds at most; '': without a limit.
--
-- The limit never gets later, and the holder keeps the key until the end that it was promised. A
-- settled lease has no holder any more, so it is shortened itself.
--
-- KEYS: record; if tokens are indexed, the index of the token, which stays as it is.
-- Answers: held now record | free
local lock = KEYS[1]
local seconds, token, channel, seen = unpack(ARGV)

local held = redis.call('HMGET', lock, 'free_at', 'expires_at', 'wanted', 'renewed_until')
local free_at, expires_at, settled = held[1], held[2], held[1] == held[2] and held[1] ~= ''
if not free_at or not is_live(free_at) or token ~= '' and refused(lock, token)
    or not is_seen(lock, seen) then
    return 'free'
end
if seconds == '' then
    redis.call('HSETNX', lock, 'stop_requested_at', text(now))
    return 'held ' .. text(now) .. ' ' .. described(lock)
end
local last = lease_ends(seconds, 0)
local sooner = is_sooner(last, expires_at)
if expires_at == '' or settled and not sooner then
    return 'held ' .. text(now) .. ' ' .. described(lock)
end
begin(lock)
if sooner then
    redis.call('HSET', lock, 'expires_at', last)
end
if settled then
    redis.call('HSET', lock, 'free_at', last)
    free_at = last
else
    redis.call('HSETNX', lock, 'stop_requested_at', text(now))
    if is_sooner(last, held[4] or '') then
        redis.call('HSET', lock, 'renewed_until', last)
    end
end
-- Before the next line, which may remove the record immediately.
local record = described(lock)
remove_at(lock, free_at)
if settled and held[3] then
    wake(channel, lock)
end
return 'held ' .. text(now) .. ' ' .. record
