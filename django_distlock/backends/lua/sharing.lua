-- Read the records of all sharers of a key.
--
-- KEYS: sharers. Answers: records, as JSON
local records = {}
for _, place in ipairs((sharers(KEYS[1]))) do
    table.insert(records, described(place))
end
return '[' .. table.concat(records, ',') .. ']'
