-- Read the record of a held key; of several sharers, the one with the latest free_at. An expired
-- record may be removed.
--
-- KEYS: record, and sharers. Answers: held now record | free
local lock, shared = unpack(KEYS)
local cleanup = ARGV[1]

local free_at = redis.call('HGET', lock, 'free_at')
if free_at and is_live(free_at) then
    return 'held ' .. text(now) .. ' ' .. described(lock)
end
if free_at and cleanup == '1' then
    redis.call('DEL', lock)
end
local last = shared and last_to_end((sharers(shared)))
if last then
    return 'held ' .. text(now) .. ' ' .. described(last)
end
return 'free'
