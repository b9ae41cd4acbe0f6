-- Grant several keys, or none of them: first all are checked, then all are granted.
--
-- KEYS: for each key those of `share`, without the listing, which comes last, and without the index
-- of a replaced token. ARGV: ttl, grace, maximum, holder, channel, permits, door; then for each key
-- its token and the key.
-- Answers, as JSON: place, answer. Place 0: the answers for all keys. Else: the answer for the key at
-- this place, which is not granted; then nothing was written.
local ttl, grace, maximum, holder, channel, permits, door = unpack(ARGV, 1, 7)
local each, number, listing = 6, (#KEYS - 1) / 6, KEYS[#KEYS]

local function ask(place, look)
    local record, lock, fence, pause, shared, index = unpack(KEYS, (place - 1) * each + 1, place * each)
    local token, key = unpack(ARGV, 6 + place * 2, 7 + place * 2)
    local words = {
        token, ttl, grace, maximum, key, holder, '', '', channel, permits, door, look or nil,
    }
    local answer = 'shared'
    if permits == '1' then
        answer = acquire({lock, fence, pause, shared, listing, index}, words)
    end
    if answer == 'shared' then
        answer = share({record, lock, fence, pause, shared, listing, index}, words)
    end
    return answer
end

for place = 1, number do
    local answer = ask(place, '1')
    if answer ~= 'free' then
        return cjson.encode({place, answer})
    end
end
local answers = {}
for place = 1, number do
    answers[place] = ask(place)
end
return cjson.encode({0, answers})
