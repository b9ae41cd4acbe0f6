-- What every script begins with.
--
-- Times are microseconds since 1970, which a double holds exactly. "" stands for none.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- In full: tostring() would make 1.79e+15 of it.
local function text(number)
    return string.format('%.0f', number)
end

local function is_live(free_at)
    return free_at == '' or now < tonumber(free_at)
end

local function microseconds(seconds)
    return math.floor(seconds * 1000000 + 0.5)
end

-- When a lease ends that is granted or extended now, and from when on its key is free.
local function lease_ends(ttl, grace)
    if ttl == '' then
        return '', ''
    end
    local expires_at = now + microseconds(ttl)
    return text(expires_at), text(expires_at + microseconds(grace))
end

-- Let Redis remove a key at a time, which it counts in milliseconds: never before.
local function remove_at(key, time)
    if time == '' then
        redis.call('PERSIST', key)
    else
        redis.call('PEXPIREAT', key, text(math.ceil(time / 1000)))
    end
end

-- A server without memory lets a script go on that began with a write that takes none.
local function begin(lock)
    redis.call('PERSIST', lock)
end

-- All fields of a record, as JSON.
local function described(lock)
    local fields, flat = {}, redis.call('HGETALL', lock)
    for each = 1, #flat, 2 do
        fields[flat[each]] = flat[each + 1]
    end
    return cjson.encode(fields)
end

-- Why a token may not extend or release: the record is missing, another's, expired, or settled.
-- Where it may: nil, when the key is free, and whether somebody waits to hear of that.
local function refused(lock, token)
    local held = redis.call('HMGET', lock, 'token', 'free_at', 'expires_at', 'wanted')
    if not held[1] then
        return 'missing'
    elseif held[1] ~= token then
        return 'other'
    elseif not is_live(held[2]) then
        return 'expired'
    elseif held[2] ~= '' and held[2] == held[3] then
        return 'settled'
    end
    return nil, held[2], held[4]
end

-- Whether a record is the grant of this fence ("": of any), which somebody has looked at.
local function is_seen(lock, fence)
    return fence == '' or redis.call('HGET', lock, 'fence') == fence
end

local function is_sooner(free_at, before)
    return free_at ~= '' and (before == '' or tonumber(free_at) < tonumber(before))
end

-- Call out to the waiters of a key that something has become of it. Where the server forbids that,
-- they ask again by themselves.
local function wake(channel, key)
    -- No prefix has a brace: the first one begins the name, behind the role.
    redis.pcall('PUBLISH', channel, string.sub(key, string.find(key, '{', 1, true), -1))
end

-- A counter that is no number is nil, and so an error before anything is written.
local function last_fence(fence)
    return tonumber(string.match(redis.call('GET', fence) or '0', '^%d+$'))
end

-- The fence of the next grant: what the clock counts in 10 µs is the least, because a counter may
-- be lost with the data, or be stale where a replica took over.
local function next_fence(fence)
    return math.max(last_fence(fence) + 1, math.floor(now / 10))
end
