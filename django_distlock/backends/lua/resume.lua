-- End a pause.
--
-- KEYS: pause. Answers: resumed | free
local paused = now < tonumber(redis.call('HGET', KEYS[1], 'until') or '0')
redis.call('DEL', KEYS[1])
-- Always, because callers that the pause refused have left no mark.
wake(ARGV[1], KEYS[1])
return paused and 'resumed' or 'free'
