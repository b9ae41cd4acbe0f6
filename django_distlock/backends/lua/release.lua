-- Release a key, or keep it held until some seconds after its grant, without grace.
--
-- KEYS: record; of a sharer, the sharers of its key; if they are used, the listing, and the index of
-- the token.
-- Answers: released | wanted (released, and there was a waiter) | why not
local lock = KEYS[1]
local shared = whole(lock) ~= lock and KEYS[2]
local listing, index = unpack(KEYS, shared and 3 or 2)
local token, channel, seconds = unpack(ARGV)

local why_not, _, wanted = refused(lock, token)
if why_not then
    return why_not
end
if index then
    redis.call('DEL', index)
end
local ends = seconds and redis.call('HGET', lock, 'acquired_at') + microseconds(seconds)
if ends and now < ends then
    begin(lock)
    redis.call('HSET', lock, 'expires_at', text(ends), 'free_at', text(ends))
    remove_at(lock, text(ends))
    list(listing, lock, text(ends))
    if shared then
        keep_name(shared, lock, text(ends))
    end
else
    remove(lock, listing)
    if shared then
        drop_place(shared, lock)
    end
end
if not wanted then
    return 'released'
end
wake(channel, lock)
return 'wanted'
