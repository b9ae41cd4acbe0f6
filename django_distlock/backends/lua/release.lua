-- Give a key back, or keep it taken for so many seconds since its grant, without grace.
--
-- KEYS: record; where tokens are indexed, that of the token.
-- Answers: released | why not
local lock, index = unpack(KEYS)
local token, seconds = unpack(ARGV)

local why_not = refused(lock, token)
if why_not then
    return why_not
end
if index then
    redis.call('DEL', index)
end
if seconds then
    local ends = redis.call('HGET', lock, 'acquired_at') + microseconds(seconds)
    if now < ends then
        begin(lock)
        redis.call('HSET', lock, 'expires_at', text(ends), 'free_at', text(ends))
        remove_at(lock, text(ends))
        return 'released'
    end
end
redis.call('DEL', lock)
return 'released'
