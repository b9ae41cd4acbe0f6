-- Raise a fence counter, or make it, unless somebody holds the key.
--
-- KEYS: record, fence, and sharers. Answers: raised | held | enough
local lock, fence, shared = unpack(KEYS)
local to = tonumber(ARGV[1]) or math.floor(now / 10)

if last_fence(fence) >= to then
    return 'enough'
end
local free_at = redis.call('HGET', lock, 'free_at')
if free_at and is_live(free_at) or (sharers(shared))[1] then
    return 'held'
end
redis.call('SET', fence, text(to))
return 'raised'
