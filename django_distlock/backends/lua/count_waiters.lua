-- Count the waiters of a key.
--
-- KEYS: waiters. Answers: how many wait in a process, and how many are queued again, as text
local waiting, retrying = 0, 0
for _, note in ipairs(redis.call('ZRANGE', KEYS[1], '(' .. text(now), '+inf', 'BYSCORE')) do
    -- The first of these names is the holder's own: its metadata comes last.
    local pid, task_id = string.match(note, '"pid": (%d+)'), string.match(note, '"task_id": (.)')
    if pid == '0' and task_id == '"' then
        retrying = retrying + 1
    elseif pid then
        waiting = waiting + 1
    end
end
return waiting .. ' ' .. retrying
