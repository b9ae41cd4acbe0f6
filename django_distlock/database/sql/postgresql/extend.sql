-- Replace the ttl of a lease. Times are microseconds since 1970, p_ttl and p_grace are seconds.
-- If the key has a waiter and becomes free sooner than before, a wake-up is sent.
--
-- Answers a JSON array: outcome, fence, acquired_at, expires_at, stop_requested.
--
-- outcome   extended   all of them
--           gone       no such record, another token, past free_at, settled, or past the end that
--                      an operator has set
--           busy       no answer within p_bound; the record is unchanged
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_extend_v3"(
    p_storage_key text, p_token text,
    p_ttl double precision, p_grace double precision, p_bound text
) RETURNS text LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    -- Not of the row's type, which would lock the table before lock_timeout is set.
    r record;
    t bigint;
    v_expires bigint;
    v_free bigint;
    v_grace bigint := pg_catalog.round(p_grace * 1000000)::bigint;
    v_answer text;
    v_lock_timeout text := pg_catalog.current_setting('lock_timeout');
    v_ignored text;
BEGIN
    {require_isolation}
    v_ignored := pg_catalog.set_config('lock_timeout', p_bound, true);
    BEGIN
        SELECT * INTO r FROM "django_distlock_heldlock" l
            WHERE l.storage_key = p_storage_key FOR UPDATE;
        t := {now};
        IF r.storage_key IS NULL OR r.token <> p_token OR t >= r.free_at
                OR r.free_at = r.expires_at OR t >= r.renewed_until THEN
            v_answer := '["gone"]';
        ELSE
            v_expires := t + pg_catalog.round(p_ttl * 1000000)::bigint;
            v_free := v_expires + v_grace;
            UPDATE "django_distlock_heldlock" l SET
                ttl = p_ttl, renewed_at = t,
                expires_at = least(v_expires, r.renewed_until), free_at = v_free
                WHERE l.storage_key = p_storage_key;
            IF r.wanted AND (v_free < r.free_at OR r.free_at IS NULL AND v_free IS NOT NULL) THEN
                PERFORM pg_catalog.pg_notify({channel}, {called_whole})
                    FROM "django_distlock_heldlock_salt" s;
            END IF;
            {durable}
            v_answer := pg_catalog.json_build_array(
                'extended', r.fence, r.acquired_at, v_expires, r.stop_requested_at IS NOT NULL
            );
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        v_answer := '["busy"]';
    END;
    v_ignored := pg_catalog.set_config('lock_timeout', v_lock_timeout, true);
    RETURN v_answer;
END $body$;
