-- Grant a key if it is free. Times are microseconds since 1970, p_ttl and p_grace are seconds.
--
-- outcome   granted    now, fence, acquired_at, expires_at
--           contended  who holds it: fence, acquired_at, expires_at, free_at, holder
--           paused     the same, where somebody holds it
--           busy       no answer within p_lock_ms; the last holder that was seen, if any
--           overflow   the key has used up its fences; nothing was written
--
-- Locks are taken in the order advisory(key), fence row, lock row, here and everywhere.
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_acquire_v1"(
    p_storage_key text, p_key text, p_advisory bigint, p_token text,
    p_ttl double precision, p_grace double precision,
    p_holder jsonb, p_host text, p_task_id text,
    p_wanted boolean, p_replace text, p_lock_ms integer
) RETURNS TABLE (
    outcome text, now bigint, fence bigint,
    acquired_at bigint, expires_at bigint, free_at bigint, holder text
) LANGUAGE plpgsql VOLATILE AS $body$
#variable_conflict use_column
DECLARE
    -- Not of the row's type, which would lock the table before lock_timeout is set.
    r record;
    t bigint;
    v_paused_until bigint;
    v_live boolean;
    v_seen boolean := false;
    v_locked boolean := false;
    v_fence bigint;
    v_expires bigint;
    v_free bigint;
    v_lock_timeout text := current_setting('lock_timeout');
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- An older snapshot would not show what was committed while this waited.
        RAISE EXCEPTION 'distlock needs READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    -- 0 would mean "for ever".
    PERFORM set_config('lock_timeout', greatest(p_lock_ms, 1)::text, true);
    BEGIN
        LOOP
            -- Read first: whoever loses takes no lock and writes nothing.
            SELECT * INTO r FROM "django_distlock_heldlock" l WHERE l.storage_key = p_storage_key;
            SELECT c.paused_until INTO v_paused_until
                FROM "django_distlock_fencecounter" c WHERE c.storage_key = p_storage_key;
            t := floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
            v_live := r.storage_key IS NOT NULL AND (r.free_at IS NULL OR t < r.free_at);
            v_seen := true;
            outcome := CASE
                WHEN t < v_paused_until THEN 'paused'
                WHEN v_live AND r.token IS DISTINCT FROM p_replace THEN 'contended' END;
            IF outcome IS NOT NULL THEN
                IF v_live AND p_wanted AND NOT r.wanted THEN
                    UPDATE "django_distlock_heldlock" l SET wanted = true
                        WHERE l.storage_key = p_storage_key AND l.token = r.token AND NOT l.wanted;
                    -- Released or marked by somebody else meanwhile: look again.
                    CONTINUE WHEN NOT FOUND;
                    -- Losing the mark in a crash costs one step of backoff.
                    PERFORM set_config('synchronous_commit', 'off', true);
                END IF;
                EXIT;
            END IF;
            IF NOT v_locked THEN
                -- One acquirer per key. Those who queued behind the winner look again and lose
                -- above, without a row lock.
                PERFORM pg_advisory_xact_lock(p_advisory);
                v_locked := true;
                CONTINUE;
            END IF;
            -- A guard's FOR SHARE may stand for as long as a transaction: answer now.
            PERFORM 1 FROM "django_distlock_fencecounter" c
                WHERE c.storage_key = p_storage_key FOR NO KEY UPDATE NOWAIT;
            -- Waits for an extend or a release in flight.
            SELECT * INTO r FROM "django_distlock_heldlock" l
                WHERE l.storage_key = p_storage_key FOR UPDATE;
            SELECT c.paused_until INTO v_paused_until
                FROM "django_distlock_fencecounter" c WHERE c.storage_key = p_storage_key;
            -- The clock after every wait, or a lease would come back with a part of it gone.
            t := floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
            v_live := r.storage_key IS NOT NULL AND (r.free_at IS NULL OR t < r.free_at);
            CONTINUE WHEN t < v_paused_until OR (v_live AND r.token IS DISTINCT FROM p_replace);

            v_expires := t + round(p_ttl * 1000000)::bigint;
            v_free := v_expires + round(p_grace * 1000000)::bigint;
            INSERT INTO "django_distlock_fencecounter" AS c (storage_key, key, fence)
                VALUES (p_storage_key, p_key, 1)
                ON CONFLICT (storage_key) DO UPDATE SET fence = c.fence + 1
                RETURNING c.fence INTO v_fence;
            INSERT INTO "django_distlock_heldlock" AS l (
                    storage_key, key, token, fence, ttl, acquired_at, renewed_at, expires_at,
                    free_at, wanted, holder, holder_host, task_id, stop_requested_at
                ) VALUES (
                    p_storage_key, p_key, p_token, v_fence, p_ttl, t, t, v_expires,
                    v_free, false, p_holder, p_host, p_task_id, NULL
                ) ON CONFLICT (storage_key) DO UPDATE SET
                    token = excluded.token, fence = excluded.fence, ttl = excluded.ttl,
                    acquired_at = excluded.acquired_at, renewed_at = excluded.renewed_at,
                    expires_at = excluded.expires_at, free_at = excluded.free_at, wanted = false,
                    holder = excluded.holder, holder_host = excluded.holder_host,
                    task_id = excluded.task_id, stop_requested_at = NULL;
            -- A grant that a crash of the server undoes would be given twice. In the body, because
            -- a SET clause of the function ends before the commit. A stronger setting stays.
            IF current_setting('synchronous_commit') <> 'remote_apply' THEN
                PERFORM set_config('synchronous_commit', 'on', true);
            END IF;
            outcome := 'granted'; fence := v_fence;
            acquired_at := t; expires_at := v_expires; free_at := v_free;
            EXIT;
        END LOOP;
    EXCEPTION
        WHEN lock_not_available OR deadlock_detected THEN
            outcome := 'busy';
        WHEN check_violation THEN
            outcome := 'overflow';
    END;
    -- A test case's transaction goes on behind us.
    PERFORM set_config('lock_timeout', v_lock_timeout, true);
    now := t;
    -- Busy before anything was read, r has no columns yet.
    IF outcome IN ('contended', 'paused', 'busy') AND v_seen THEN
        fence := r.fence; acquired_at := r.acquired_at; expires_at := r.expires_at;
        free_at := r.free_at; holder := r.holder::text;
    END IF;
    RETURN NEXT;
END $body$;
