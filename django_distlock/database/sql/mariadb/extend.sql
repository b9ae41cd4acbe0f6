-- Replace the ttl of a lease.
--
-- Answers a row: outcome, fence, acquired_at, expires_at, stop_requested.
--
-- outcome   extended   all of them
--           gone       no such record, another token, past free_at, settled, or past the end that
--                      an operator has set
{begin}
{owned}
    SET v_outcome = 'gone';
    IF h_ours AND (v_until IS NULL OR t < v_until) THEN
        UPDATE {locks} SET ttl = %(ttl)s, renewed_at = t,
            expires_at = COALESCE(LEAST(t + %(lasts)s, v_until), t + %(lasts)s, v_until),
            free_at = t + %(lasts)s + {grace}
            WHERE storage_key = %(name)s;
        SET v_outcome = 'extended';
    END IF;
    COMMIT;
    SELECT v_outcome, h_fence, h_acquired_at, t + %(lasts)s, h_stop IS NOT NULL;
END
