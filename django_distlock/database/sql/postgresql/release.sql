-- Release a key; or, with p_held, keep it held until acquired_at + p_held seconds, without grace.
--
-- If the key has a waiter, a wake-up is sent, even if the deleted record had expired.
--
-- outcome   released   the record was deleted or settled
--           wanted     the same, and the key has a waiter
--           gone       no such record, another token, past free_at, or settled
--           busy       no answer within p_bound; the record is unchanged
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_release_v3"(
    p_storage_key text, p_token text, p_held double precision, p_bound text
) RETURNS text LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    -- Not of the row's type, which would lock the table before lock_timeout is set.
    r record;
    t bigint;
    v_until bigint;
    v_outcome text := 'gone';
    v_lock_timeout text := pg_catalog.current_setting('lock_timeout');
    v_ignored text := pg_catalog.set_config('lock_timeout', p_bound, true);
BEGIN
    {require_isolation}
    BEGIN
        IF p_held IS NULL THEN
            -- Judged by the clock after the wait: with the clock in its condition, it would judge
            -- by the time before. What was over by then belonged to nobody, and may go as well.
            DELETE FROM "django_distlock_heldlock" l
                WHERE l.storage_key = p_storage_key AND l.token = p_token
                    AND (l.free_at IS NULL OR l.free_at <> l.expires_at)
                RETURNING l.free_at, l.wanted INTO r;
            IF FOUND AND (r.free_at IS NULL
                    OR r.free_at > {now}) THEN
                v_outcome := 'released';
            END IF;
            -- Losing it in a crash costs the rest of the ttl.
            v_ignored := pg_catalog.set_config('synchronous_commit', 'off', true);
        ELSE
            SELECT * INTO r FROM "django_distlock_heldlock" l
                WHERE l.storage_key = p_storage_key AND l.token = p_token FOR UPDATE;
            t := {now};
            v_until := r.acquired_at + pg_catalog.round(p_held * 1000000)::bigint;
            IF r.storage_key IS NOT NULL
                    AND (r.free_at IS NULL OR (t < r.free_at AND r.free_at <> r.expires_at)) THEN
                -- Durable, for it may end the lease sooner or later than it would by itself.
                UPDATE "django_distlock_heldlock" l SET expires_at = v_until, free_at = v_until
                    WHERE l.storage_key = p_storage_key AND t < v_until;
                IF NOT FOUND THEN
                    DELETE FROM "django_distlock_heldlock" l WHERE l.storage_key = p_storage_key;
                END IF;
                v_outcome := 'released';
            END IF;
        END IF;
        IF r.wanted AND (p_held IS NULL OR v_outcome = 'released') THEN
            PERFORM pg_catalog.pg_notify({channel}, {called_whole})
                FROM "django_distlock_heldlock_salt" s;
            IF v_outcome = 'released' THEN
                v_outcome := 'wanted';
            END IF;
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        v_outcome := 'busy';
    END;
    v_ignored := pg_catalog.set_config('lock_timeout', v_lock_timeout, true);
    RETURN v_outcome;
END $body$;
