-- Give a lease p_ttl more seconds from now.
--
-- outcome   extended   fence, acquired_at, expires_at, stop_requested
--           gone       no such record, another token, past free_at, or settled
--           busy       no answer within p_lock_ms; the record stands
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_extend_v1"(
    p_storage_key text, p_token text,
    p_ttl double precision, p_grace double precision, p_lock_ms integer
) RETURNS TABLE (
    outcome text, fence bigint, acquired_at bigint, expires_at bigint, stop_requested boolean
) LANGUAGE plpgsql VOLATILE AS $body$
#variable_conflict use_column
DECLARE
    -- Not of the row's type, which would lock the table before lock_timeout is set.
    r record;
    t bigint;
    v_expires bigint;
    v_lock_timeout text := current_setting('lock_timeout');
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'distlock needs READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    PERFORM set_config('lock_timeout', greatest(p_lock_ms, 1)::text, true);
    BEGIN
        SELECT * INTO r FROM "django_distlock_heldlock" l
            WHERE l.storage_key = p_storage_key FOR UPDATE;
        t := floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
        IF NOT FOUND OR r.token <> p_token OR t >= r.free_at OR r.free_at = r.expires_at THEN
            outcome := 'gone';
        ELSE
            v_expires := t + round(p_ttl * 1000000)::bigint;
            UPDATE "django_distlock_heldlock" l SET
                ttl = p_ttl, renewed_at = t, expires_at = v_expires,
                free_at = v_expires + round(p_grace * 1000000)::bigint
                WHERE l.storage_key = p_storage_key;
            IF current_setting('synchronous_commit') <> 'remote_apply' THEN
                PERFORM set_config('synchronous_commit', 'on', true);
            END IF;
            outcome := 'extended'; fence := r.fence; acquired_at := r.acquired_at;
            expires_at := v_expires; stop_requested := r.stop_requested_at IS NOT NULL;
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        outcome := 'busy';
    END;
    PERFORM set_config('lock_timeout', v_lock_timeout, true);
    RETURN NEXT;
END $body$;
