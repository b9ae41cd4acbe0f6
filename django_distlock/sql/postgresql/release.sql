-- Give a key back; or, with p_held, keep it taken without grace until acquired_at + p_held seconds.
--
-- outcome   released   the record went, or was settled
--           gone       no such record, another token, past free_at, or settled
--           busy       no answer within p_lock_ms; the record stands
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_release_v1"(
    p_storage_key text, p_token text, p_held double precision, p_lock_ms integer
) RETURNS text LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    -- Not of the row's type, which would lock the table before lock_timeout is set.
    r record;
    t bigint;
    v_until bigint;
    v_outcome text;
    v_lock_timeout text := current_setting('lock_timeout');
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'distlock needs READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    PERFORM set_config('lock_timeout', greatest(p_lock_ms, 1)::text, true);
    BEGIN
        -- Locked before it is judged: a plain DELETE with the clock in its condition would judge
        -- by the time before the wait.
        SELECT * INTO r FROM "django_distlock_heldlock" l
            WHERE l.storage_key = p_storage_key FOR UPDATE;
        t := floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
        v_until := r.acquired_at + round(p_held * 1000000)::bigint;
        IF r.storage_key IS NULL OR r.token <> p_token OR t >= r.free_at
                OR r.free_at = r.expires_at THEN
            v_outcome := 'gone';
        ELSIF t < v_until THEN
            UPDATE "django_distlock_heldlock" l SET expires_at = v_until, free_at = v_until
                WHERE l.storage_key = p_storage_key;
            v_outcome := 'released';
        ELSE
            DELETE FROM "django_distlock_heldlock" l WHERE l.storage_key = p_storage_key;
            -- Losing it in a crash costs the rest of the ttl. Settling is not like that: it may
            -- end the lease sooner or later than the store would by itself.
            PERFORM set_config('synchronous_commit', 'off', true);
            v_outcome := 'released';
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        v_outcome := 'busy';
    END;
    PERFORM set_config('lock_timeout', v_lock_timeout, true);
    RETURN v_outcome;
END $body$;
