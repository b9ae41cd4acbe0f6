-- Grant a key to a sharer, or exclusively where sharers may be in the way: the rule is `in_the_way`
-- in core/sharing.py.
--
-- KEYS: the new record, the record of an exclusive holder, fence, pause, sharers; if they are used,
-- the listing, and the indexes of the token and of the replaced one.
-- Answers: as `acquire`.
local place, lock, fence, pause, shared, listing, index, replaced = unpack(KEYS)
local token, ttl, grace, maximum, key, holder, wanted, replace, channel, permits, door, look = unpack(ARGV)
local alone = permits == '1'

local held = redis.call('HMGET', lock, 'token', 'free_at')
local live, over = sharers(shared)
if held[1] and is_live(held[2]) then
    live = {lock}
elseif held[1] then
    table.insert(over, lock)
end
local others, own, again = {}, {}, false
for _, each in ipairs(live) do
    local theirs, free_at, expires_at = unpack(
        redis.call('HMGET', each, 'token', 'free_at', 'expires_at')
    )
    local spent = theirs == token and free_at ~= '' and free_at == expires_at
    if replace ~= '' and not spent
        and (theirs == replace or not alone and theirs == token) then
        table.insert(own, each)
    else
        again = again or theirs == token
        table.insert(others, each)
    end
end
local closed = tonumber(redis.call('HGET', shared, 'closed') or '0')
local is_closed = not (alone or own[1]) and now < closed
local gone = not (alone or own[1] or replace == '' or replace == token)
local blocking, ends
if #others > 0 then
    if alone or gone or live[1] == lock then
        blocking = last_to_end(others)
    elseif own[1] then
        blocking = nil
    elseif again or permits ~= '' and #others >= tonumber(permits) then
        blocking = others[1]
        for _, each in ipairs(others) do
            if is_sooner(redis.call('HGET', each, 'free_at'), redis.call('HGET', blocking, 'free_at')) then
                blocking = each
            end
        end
    elseif is_closed then
        blocking, ends = last_to_end(others), closed
    end
end
local paused = now < tonumber(redis.call('HGET', pause, 'until') or '0')
if paused or blocking or gone or is_closed then
    local outcome = (paused and 'paused ' or 'contended ') .. text(now)
    blocking = not paused and blocking or last_to_end(live)
    if not blocking then
        return outcome
    end
    if wanted == '1' then
        for _, each in ipairs(live) do
            redis.call('HSETNX', each, 'wanted', '1')
        end
        if alone and live[1] ~= lock then
            keep_name(shared, 'closed', text(now + microseconds(door)))
        end
    end
    return outcome .. ' ' .. described(blocking, not paused and ends)
end
local indexed = index and redis.call('GET', index)
if indexed and whole(indexed) ~= lock then
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
local called
local asked = passed_on(own, holder)
for _, each in ipairs(own) do
    table.insert(over, each)
end
for _, each in ipairs(over) do
    called = redis.call('HGET', each, 'wanted') or called
    remove(each, listing)
    redis.call('HDEL', shared, each)
end
if replaced and own[1] then
    redis.call('DEL', replaced)
end
local expires_at, free_at = put_record(place, listing, index, key, token, granted, ttl, grace, holder)
pass_on(place, asked)
if alone then
    redis.call('DEL', shared)
else
    redis.call('HSET', place, 'shared', '1')
    keep_name(shared, place, free_at)
end
if called then
    -- The waiters have to mark this grant.
    wake(channel, lock)
end
return 'granted ' .. text(granted) .. ' ' .. text(now) .. ' ' .. expires_at
