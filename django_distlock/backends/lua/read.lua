-- Read the record of a held key. An expired one may be removed on the way.
--
-- KEYS: record. Answers: held now record | free
local lock = KEYS[1]
local cleanup = ARGV[1]

local free_at = redis.call('HGET', lock, 'free_at')
if free_at and is_live(free_at) then
    return 'held ' .. text(now) .. ' ' .. described(lock)
end
if free_at and cleanup == '1' then
    redis.call('DEL', lock)
end
return 'free'
