-- Grant a key if it is free. Times are microseconds since 1970, p_ttl and p_grace are seconds.
--
-- Answers a JSON array: outcome, now, fence, acquired_at, expires_at, free_at, holder.
--
-- outcome   granted    now, fence, acquired_at, expires_at
--           contended  the lease: fence, acquired_at, expires_at, free_at, holder
--           paused     the same, if the key is held
--           busy       no answer within p_bound; the last holder that was seen, if any
--           overflow   the key has used up its fences; nothing was written
--           shared     the key is shared, or was; nothing was written
--
-- Locks are taken in the order advisory(key), fence row, lock row, here and everywhere.
--
-- With p_wanted, the record that is in the way is marked. The session that ends, replaces or shortens
-- a marked grant sends a hash of its storage key, on a channel with a secret name. Without a waiter
-- nothing is sent, because NOTIFY takes a lock of the whole server at commit.
--
-- A token that replaces itself (p_replace = p_token) does not get what it has settled: such a call
-- has arrived after the end of its own work.
--
-- A request to stop stays if a live lease keeps its holder, or is handed over, which settles it
-- first. A holder that replaces a dead one gets no request.
--
-- All these functions answer with one text, because a row of columns costs the server a third more
-- than the call itself: see docs/explanation/performance.md.
--
-- Names are looked up in pg_catalog alone, here and everywhere: in a schema where others may create,
-- a function or an operator that fits a call better would be called instead, as the caller's role.
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_acquire_v3"(
    p_storage_key text, p_key text, p_token text,
    p_ttl double precision, p_grace double precision, p_holder jsonb,
    p_wanted boolean, p_replace text, p_floor boolean, p_bound text
) RETURNS text LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    -- Who holds the key. Columns and no row, whose type would lock the table before lock_timeout
    -- is set.
    h_token text;
    h_fence bigint;
    h_acquired_at bigint;
    h_expires_at bigint;
    h_free_at bigint;
    h_wanted boolean;
    h_holder jsonb;
    h_now bigint;
    h_live boolean;
    t bigint;
    v_turn bigint;
    v_outcome text;
    v_last bigint;
    v_paused boolean;
    v_shared boolean;
    v_fence bigint;
    v_expires bigint;
    v_lock_timeout text := pg_catalog.current_setting('lock_timeout');
    -- Assigned and not PERFORMed: an expression costs a fifth of a statement.
    v_ignored text := pg_catalog.set_config('lock_timeout', p_bound, true);
BEGIN
    {require_isolation}
    BEGIN
        LOOP
            -- Read first: whoever loses takes no lock and writes nothing.
            SELECT
                l.token, l.fence, l.acquired_at, l.expires_at, l.free_at, l.wanted, l.holder,
                {now}
                INTO h_token, h_fence, h_acquired_at, h_expires_at, h_free_at, h_wanted, h_holder,
                    h_now
                FROM "django_distlock_heldlock" l
                WHERE l.storage_key = p_storage_key;
            h_live := h_token IS NOT NULL AND (h_free_at IS NULL OR h_now < h_free_at);
            IF h_live AND (
                h_token IS DISTINCT FROM p_replace
                OR p_replace = p_token AND h_free_at = h_expires_at
            ) THEN
                v_outcome := 'contended';
            ELSE
                IF v_turn IS NULL THEN
                    SELECT {turn} INTO v_turn FROM "django_distlock_heldlock_salt" s;
                    {require_salt}
                END IF;
                IF NOT pg_catalog.pg_try_advisory_xact_lock(v_turn) THEN
                    -- One acquirer per key. Those who queued behind the winner look again and lose
                    -- above, without a row lock.
                    PERFORM pg_catalog.pg_advisory_xact_lock(v_turn);
                    CONTINUE;
                END IF;
                -- A guard's FOR SHARE may stand for as long as a transaction: answer now.
                SELECT c.fence, c.closed_until IS NOT NULL INTO v_last, v_shared FROM "django_distlock_fencecounter" c
                    WHERE c.storage_key = p_storage_key AND (
                        c.paused_until IS NULL OR c.paused_until <= {now}
                    ) FOR NO KEY UPDATE NOWAIT;
            END IF;
            IF v_last IS NULL THEN
                SELECT c.paused_until > {now}
                    INTO v_paused
                    FROM "django_distlock_fencecounter" c WHERE c.storage_key = p_storage_key;
                IF v_paused THEN
                    v_outcome := 'paused';
                ELSIF v_outcome IS NULL AND FOUND THEN
                    CONTINUE; -- The pause has just ended.
                END IF;
                IF v_outcome IS NOT NULL THEN
                    IF p_wanted AND h_live AND NOT h_wanted THEN
                        -- Its end as of the mark: what shortened it before told nobody.
                        UPDATE "django_distlock_heldlock" l SET wanted = true
                            WHERE l.storage_key = p_storage_key AND l.token = h_token
                                AND NOT l.wanted
                            RETURNING l.expires_at, l.free_at INTO h_expires_at, h_free_at;
                        IF NOT FOUND THEN
                            -- Released or marked by somebody else meanwhile: look again.
                            v_outcome := NULL;
                            CONTINUE;
                        END IF;
                        -- Losing the mark in a crash costs one step of backoff.
                        v_ignored := pg_catalog.set_config('synchronous_commit', 'off', true);
                    END IF;
                    EXIT;
                END IF;
            END IF;
            IF v_shared THEN
                v_outcome := 'shared';
                EXIT;
            END IF;
            -- Waits for an extend or a release in flight.
            SELECT l.wanted INTO h_wanted FROM "django_distlock_heldlock" l
                WHERE l.storage_key = p_storage_key FOR UPDATE;
            -- The clock after every wait, or a lease would come back with a part of it gone.
            t := {now};
            v_expires := t + pg_catalog.round(p_ttl * 1000000)::bigint;
            -- What the clock counts in 10 µs is the least, where a counter may be lost or stale.
            v_fence := greatest(v_last + 1, CASE WHEN p_floor THEN t / 10 ELSE 1 END);
            IF FOUND THEN
                UPDATE "django_distlock_heldlock" l SET
                    token = p_token, fence = v_fence, ttl = p_ttl, acquired_at = t, renewed_at = t,
                    expires_at = least(v_expires, CASE WHEN (l.free_at IS NULL OR l.free_at > t)
                        AND (l.expires_at = l.free_at OR l.holder = p_holder)
                        THEN l.renewed_until END),
                    free_at = v_expires + pg_catalog.round(p_grace * 1000000)::bigint,
                    wanted = false, holder = p_holder, holder_host = p_holder->>'host',
                    task_id = p_holder->>'task_id',
                    (stop_requested_at, renewed_until) = (
                        SELECT l.stop_requested_at, l.renewed_until
                            WHERE (l.free_at IS NULL OR l.free_at > t)
                                AND (l.expires_at = l.free_at OR l.holder = p_holder)
                    )
                    WHERE l.storage_key = p_storage_key
                        AND (
                            l.free_at <= t OR l.token = p_replace AND (
                                p_replace <> p_token OR l.free_at IS NULL
                                OR l.expires_at < l.free_at
                            )
                        );
                IF NOT FOUND THEN
                    -- Granted or extended since the look above.
                    v_last := NULL;
                    CONTINUE;
                END IF;
                IF h_wanted THEN
                    -- Their mark went with the grant before, and they have to mark this one.
                    PERFORM pg_catalog.pg_notify({channel}, {called})
                        FROM "django_distlock_heldlock_salt" s;
                END IF;
            ELSE
                INSERT INTO "django_distlock_heldlock" (
                    storage_key, key, token, fence, ttl, acquired_at, renewed_at, expires_at,
                    free_at, wanted, holder, holder_host, task_id, stop_requested_at
                ) VALUES (
                    p_storage_key, p_key, p_token, v_fence, p_ttl, t, t, v_expires,
                    v_expires + pg_catalog.round(p_grace * 1000000)::bigint, false,
                    p_holder, p_holder->>'host', p_holder->>'task_id', NULL
                );
            END IF;
            IF v_last IS NULL THEN
                INSERT INTO "django_distlock_fencecounter" (storage_key, key, fence)
                    VALUES (p_storage_key, p_key, v_fence) ON CONFLICT DO NOTHING;
                IF NOT FOUND THEN
                    RAISE lock_not_available; -- As above, by a pause. Undoes the grant.
                END IF;
            ELSE
                UPDATE "django_distlock_fencecounter" c SET fence = v_fence
                    WHERE c.storage_key = p_storage_key;
            END IF;
            -- A grant that a crash of the server undoes would be given twice.
            {durable}
            v_outcome := 'granted';
            EXIT;
        END LOOP;
    EXCEPTION
        WHEN lock_not_available OR deadlock_detected THEN
            v_outcome := 'busy';
        WHEN check_violation THEN
            v_outcome := 'overflow';
    END;
    -- A test case's transaction goes on behind us.
    v_ignored := pg_catalog.set_config('lock_timeout', v_lock_timeout, true);
    IF v_outcome = 'granted' THEN
        RETURN pg_catalog.json_build_array(v_outcome, t, v_fence, t, v_expires);
    ELSIF h_live THEN
        RETURN pg_catalog.json_build_array(
            v_outcome, h_now, h_fence, h_acquired_at, h_expires_at, h_free_at, h_holder
        );
    END IF;
    RETURN pg_catalog.json_build_array(v_outcome, {now});
END $body$;
