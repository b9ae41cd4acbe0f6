-- Grant a key to nobody until a time.
--
-- KEYS: pause. Answers: paused
local pause = KEYS[1]
local until_, by = unpack(ARGV)

redis.call('DEL', pause)
if now < tonumber(until_) then
    redis.call('HSET', pause, 'until', until_, 'by', by)
    remove_at(pause, until_)
end
return 'paused'
