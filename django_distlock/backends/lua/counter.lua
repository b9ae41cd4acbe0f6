-- Read the fence of a key, and its pause.
--
-- KEYS: fence, pause. Answers: fence until by
local fence, pause = unpack(KEYS)

local until_, by = unpack(redis.call('HMGET', pause, 'until', 'by'))
if not until_ or now >= tonumber(until_) then
    until_, by = '', ''
end
return text(last_fence(fence)) .. ' ' .. until_ .. ' ' .. by
