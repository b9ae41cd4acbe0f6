-- Release a key; or, with `held`, keep it held until that long after the grant, without grace.
--
-- outcome   released   the record was deleted or settled
--           wanted     the same, and the key has a waiter
--           gone       no such record, another token, past free_at, or settled
{begin}
{owned}
    SET v_held = %(held)s, v_until = h_acquired_at + v_held, v_outcome = 'gone';
    IF h_ours THEN
        IF v_held IS NULL OR v_until <= t THEN
            DELETE FROM {locks} WHERE storage_key = %(name)s;
        ELSE
            UPDATE {locks} SET expires_at = v_until, free_at = v_until
                WHERE storage_key = %(name)s;
        END IF;
        SET v_outcome = IF(h_wanted, 'wanted', 'released');
    END IF;
    COMMIT;
    SELECT v_outcome;
END
