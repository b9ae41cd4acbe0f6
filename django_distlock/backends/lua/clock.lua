-- Read the clock.
--
-- KEYS: any, by which a cluster chooses the server. Answers: now
return text(now)
