-- Give a key back; or, with `held`, keep it taken without grace until so long behind the grant.
--
-- outcome   released   the record went, or was settled
--           wanted     the same, and somebody waits for the key
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
