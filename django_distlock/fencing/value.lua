-- Read, write or remove a value with a fence, unless its fence is higher than ours.
--
-- KEYS: the hash. ARGV: get | set | delete, our fence; the value to set, and its ttl in milliseconds
-- ("": none).
-- Answers: {done, the previous value} | {refused, its fence} | {other, the type of the key}
local name = KEYS[1]
local operation, fence, value, milliseconds = unpack(ARGV)

local kind = redis.call('TYPE', name).ok
local mark = 0
if kind ~= 'none' then
    local there = kind == 'hash' and redis.call('HGET', name, 'fence') or ''
    -- At most 15 digits, which a double holds exactly.
    mark = tonumber(string.match(there, '^%d+$'))
    if not mark then
        return {'other', kind}
    end
end
if tonumber(fence) < mark then
    return {'refused', string.format('%.0f', mark)}
end

local before = redis.call('HGET', name, 'value')
if operation == 'set' then
    redis.call('HSET', name, 'fence', fence, 'value', value)
elseif tonumber(fence) > mark then
    redis.call('HSET', name, 'fence', fence)
end
if operation == 'delete' then
    redis.call('HDEL', name, 'value')
end
if operation ~= 'get' then
    if milliseconds == '' then
        -- The fence outlives the ttl of an earlier value.
        redis.call('PERSIST', name)
    else
        redis.call('PEXPIRE', name, milliseconds)
    end
end
return {'done', before}
