-- What scripts share. Each begins with the clock, and gets the parts that it uses.
--
-- Times are microseconds since 1970, which a double holds exactly. "" means none.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- With all digits: tostring() would return 1.79e+15.
local function text(number)
    return string.format('%.0f', number)
end

local function is_live(free_at)
    return free_at == '' or now < tonumber(free_at)
end

local function microseconds(seconds)
    return math.floor(seconds * 1000000 + 0.5)
end

-- When a lease expires that is granted or extended now, and when its key becomes free.
local function lease_ends(ttl, grace)
    if ttl == '' then
        return '', ''
    end
    local expires_at = now + microseconds(ttl)
    return text(expires_at), text(expires_at + microseconds(grace))
end

-- Let Redis remove a key at a time, rounded up to milliseconds.
local function remove_at(key, time)
    if time == '' then
        redis.call('PERSIST', key)
    else
        redis.call('PEXPIREAT', key, text(math.ceil(time / 1000)))
    end
end

-- Remove expired members of a sorted set, a bounded number at a time.
local function forget_over(set)
    local over = redis.pcall('ZRANGE', set, '-inf', text(now), 'BYSCORE', 'LIMIT', 0, 100)
    if over[1] then
        redis.call('ZREM', set, unpack(over))
    end
end

-- List a record, or the waiters of a key, until a time at least. Listings are for people: a spoiled
-- one stops nothing.
local function list(listing, name, time)
    if listing then
        redis.pcall('ZADD', listing, time == '' and 'inf' or time, name)
    end
end

-- Remove a record, or the waiters of a key.
local function remove(lock, listing)
    redis.call('DEL', lock)
    if listing then
        redis.pcall('ZREM', listing, lock)
    end
end

-- Write the record of a grant. Also list it, and index its token, if those are used. Return when the
-- lease expires, and when its key becomes free.
local function put_record(lock, listing, index, key, token, fence, ttl, grace, holder)
    local expires_at, free_at = lease_ends(ttl, grace)
    redis.call(
        'HSET', lock, 'key', key, 'token', token, 'fence', text(fence), 'ttl', ttl,
        'acquired_at', text(now), 'renewed_at', text(now), 'expires_at', expires_at,
        'free_at', free_at, 'holder', holder
    )
    remove_at(lock, free_at)
    if index then
        redis.call('SET', index, lock)
        remove_at(index, free_at)
    end
    if listing then
        forget_over(listing)
        list(listing, lock, free_at)
    end
    return expires_at, free_at
end

local function is_sooner(free_at, before)
    return free_at ~= '' and (before == '' or tonumber(free_at) < tonumber(before))
end

-- What an operator has requested of these live leases, which another grant replaces: the request
-- stays if the holder does, or if a lease is handed over, which settles it first.
local function passed_on(places, holder)
    for _, place in ipairs(places) do
        local free_at, expires_at, who, stop, last = unpack(redis.call(
            'HMGET', place, 'free_at', 'expires_at', 'holder', 'stop_requested_at', 'renewed_until'
        ))
        if stop and (who == holder or free_at == expires_at and free_at ~= '') then
            return {stop, last}
        end
    end
end

-- Request it of the new lease.
local function pass_on(lock, asked)
    if not asked then
        return
    end
    redis.call('HSET', lock, 'stop_requested_at', asked[1])
    if asked[2] then
        redis.call('HSET', lock, 'renewed_until', asked[2])
        if is_sooner(asked[2], redis.call('HGET', lock, 'expires_at')) then
            redis.call('HSET', lock, 'expires_at', asked[2])
        end
    end
end

-- A server without free memory lets a script go on if its first write needs none.
local function begin(lock)
    redis.call('PERSIST', lock)
end

-- All fields of a record, as JSON. With `latest`: as if its key were free at that time or before.
local function described(lock, latest)
    local fields, flat = {}, redis.call('HGETALL', lock)
    for each = 1, #flat, 2 do
        fields[flat[each]] = flat[each + 1]
    end
    if latest and is_sooner(text(latest), fields.free_at) then
        fields.free_at = text(latest)
    end
    return cjson.encode(fields)
end

-- Why a token may not extend or release: the record is missing, another's, expired, or settled.
-- If it may: nil, when the key becomes free, and whether a waiter wants to be woken then.
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

-- Whether a record has the fence that an operator has seen ("": any).
local function is_seen(lock, fence)
    return fence == '' or redis.call('HGET', lock, 'fence') == fence
end

-- The separator between the names of a key and of a sharer: U+232A, which is in no key.
local PLACE = '\226\140\170'

-- The role and the name of a lease's key, without the name of a sharer.
local function whole(lock)
    local place = string.find(lock, PLACE, 1, true)
    return place and string.sub(lock, 1, place - 1) or lock
end

-- The live records of the sharers of a key, and the names of those that have expired.
local function sharers(shared)
    local live, over = {}, {}
    for _, place in ipairs(redis.call('HKEYS', shared)) do
        if place ~= 'closed' then
            local free_at = redis.call('HGET', place, 'free_at')
            table.insert(free_at and is_live(free_at) and live or over, place)
        end
    end
    return live, over
end

-- The one of these records with the latest free_at.
local function last_to_end(places)
    local found, latest
    for _, place in ipairs(places) do
        local free_at = tonumber(redis.call('HGET', place, 'free_at')) or math.huge
        if not latest or free_at > latest then
            found, latest = place, free_at
        end
    end
    return found
end

-- Keep the name of a sharer, or of the door, for at least as long as its lease or the door lasts.
local function keep_name(shared, name, time)
    local left = redis.call('PTTL', shared)
    redis.call('HSET', shared, name, name == 'closed' and time or '')
    if time == '' or left == -1 then
        redis.call('PERSIST', shared)
    else
        remove_at(shared, math.max(tonumber(time), left < 0 and 0 or now + left * 1000))
    end
end

-- Remove the name of a sharer.
local function drop_place(shared, place)
    redis.call('HDEL', shared, place)
    if redis.call('PTTL', shared) == -1 then
        -- A sharer without an expiry has kept the names of those that have died.
        for _, each in ipairs(redis.call('HKEYS', shared)) do
            if each ~= 'closed' and redis.call('EXISTS', each) == 0 then
                redis.call('HDEL', shared, each)
            end
        end
    end
    local closed = redis.call('HGET', shared, 'closed')
    if closed and redis.call('HLEN', shared) == 1 then
        -- A waiter for the key alone comes first.
        remove_at(shared, closed)
    end
end

-- Wake the waiters of a key, to try again. If the server forbids that, they poll.
local function wake(channel, key)
    -- No prefix has a brace, so the first one begins the name, after the role.
    redis.pcall('PUBLISH', channel, string.sub(whole(key), string.find(key, '{', 1, true), -1))
end

-- A counter that is no number is nil, and so an error before anything is written.
local function last_fence(fence)
    return tonumber(string.match(redis.call('GET', fence) or '0', '^%d+$'))
end

-- The fence of the next grant: at least the clock in units of 10 µs, because a counter may be lost
-- with the data, or be stale after a failover to a replica.
local function next_fence(fence)
    return math.max(last_fence(fence) + 1, math.floor(now / 10))
end
