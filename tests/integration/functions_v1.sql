-- The functions that the release before installed, by its first migration.

CREATE OR REPLACE FUNCTION "django_distlock_heldlock_acquire_v1"(
    p_storage_key text, p_key text, p_advisory bigint, p_token text,
    p_ttl double precision, p_grace double precision, p_holder jsonb,
    p_wanted boolean, p_replace text, p_floor boolean, p_bound text
) RETURNS text LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
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
    v_outcome text;
    v_last bigint;
    v_paused boolean;
    v_fence bigint;
    v_expires bigint;
    v_lock_timeout text := current_setting('lock_timeout');
    v_ignored text := set_config('lock_timeout', p_bound, true);
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'distlock needs READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    BEGIN
        LOOP
            SELECT
                l.token, l.fence, l.acquired_at, l.expires_at, l.free_at, l.wanted, l.holder,
                (date_part('epoch', clock_timestamp()) * 1000000)::bigint
                INTO h_token, h_fence, h_acquired_at, h_expires_at, h_free_at, h_wanted, h_holder,
                    h_now
                FROM "django_distlock_heldlock" l
                WHERE l.storage_key = p_storage_key;
            h_live := h_token IS NOT NULL AND (h_free_at IS NULL OR h_now < h_free_at);
            IF h_live AND h_token IS DISTINCT FROM p_replace THEN
                v_outcome := 'contended';
            ELSIF NOT pg_try_advisory_xact_lock(p_advisory) THEN
                PERFORM pg_advisory_xact_lock(p_advisory);
                CONTINUE;
            ELSE
                SELECT c.fence INTO v_last FROM "django_distlock_fencecounter" c
                    WHERE c.storage_key = p_storage_key AND (
                        c.paused_until IS NULL OR
                        c.paused_until <= (date_part('epoch', clock_timestamp()) * 1000000)::bigint
                    ) FOR NO KEY UPDATE NOWAIT;
            END IF;
            IF v_last IS NULL THEN
                SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint < c.paused_until
                    INTO v_paused
                    FROM "django_distlock_fencecounter" c WHERE c.storage_key = p_storage_key;
                IF v_paused THEN
                    v_outcome := 'paused';
                ELSIF v_outcome IS NULL AND FOUND THEN
                    CONTINUE;
                END IF;
                IF v_outcome IS NOT NULL THEN
                    IF p_wanted AND h_live AND NOT h_wanted THEN
                        UPDATE "django_distlock_heldlock" l SET wanted = true
                            WHERE l.storage_key = p_storage_key AND l.token = h_token
                                AND NOT l.wanted;
                        IF NOT FOUND THEN
                            v_outcome := NULL;
                            CONTINUE;
                        END IF;
                        v_ignored := set_config('synchronous_commit', 'off', true);
                    END IF;
                    EXIT;
                END IF;
            END IF;
            PERFORM FROM "django_distlock_heldlock" l
                WHERE l.storage_key = p_storage_key FOR UPDATE;
            t := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
            v_expires := t + round(p_ttl * 1000000)::bigint;
            v_fence := greatest(v_last + 1, CASE WHEN p_floor THEN t / 10 ELSE 1 END);
            IF FOUND THEN
                UPDATE "django_distlock_heldlock" l SET
                    token = p_token, fence = v_fence, ttl = p_ttl, acquired_at = t, renewed_at = t,
                    expires_at = v_expires, free_at = v_expires + round(p_grace * 1000000)::bigint,
                    wanted = false, holder = p_holder, holder_host = p_holder->>'host',
                    task_id = p_holder->>'task_id', stop_requested_at = NULL
                    WHERE l.storage_key = p_storage_key
                        AND (l.token = p_replace OR l.free_at <= t);
                IF NOT FOUND THEN
                    v_last := NULL;
                    CONTINUE;
                END IF;
            ELSE
                INSERT INTO "django_distlock_heldlock" (
                    storage_key, key, token, fence, ttl, acquired_at, renewed_at, expires_at,
                    free_at, wanted, holder, holder_host, task_id, stop_requested_at
                ) VALUES (
                    p_storage_key, p_key, p_token, v_fence, p_ttl, t, t, v_expires,
                    v_expires + round(p_grace * 1000000)::bigint, false,
                    p_holder, p_holder->>'host', p_holder->>'task_id', NULL
                );
            END IF;
            IF v_last IS NULL THEN
                INSERT INTO "django_distlock_fencecounter" (storage_key, key, fence)
                    VALUES (p_storage_key, p_key, v_fence);
            ELSE
                UPDATE "django_distlock_fencecounter" c SET fence = v_fence
                    WHERE c.storage_key = p_storage_key;
            END IF;
            IF current_setting('synchronous_commit') <> 'remote_apply' THEN
                v_ignored := set_config('synchronous_commit', 'on', true);
            END IF;
            v_outcome := 'granted';
            EXIT;
        END LOOP;
    EXCEPTION
        WHEN lock_not_available OR deadlock_detected THEN
            v_outcome := 'busy';
        WHEN check_violation THEN
            v_outcome := 'overflow';
    END;
    v_ignored := set_config('lock_timeout', v_lock_timeout, true);
    IF v_outcome = 'granted' THEN
        RETURN json_build_array(v_outcome, t, v_fence, t, v_expires);
    ELSIF h_live THEN
        RETURN json_build_array(
            v_outcome, h_now, h_fence, h_acquired_at, h_expires_at, h_free_at, h_holder
        );
    END IF;
    RETURN json_build_array(
        v_outcome, (date_part('epoch', clock_timestamp()) * 1000000)::bigint
    );
END $body$;

CREATE OR REPLACE FUNCTION "django_distlock_heldlock_extend_v1"(
    p_storage_key text, p_token text,
    p_ttl double precision, p_grace double precision, p_bound text
) RETURNS text LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    r record;
    t bigint;
    v_expires bigint;
    v_answer text;
    v_lock_timeout text := current_setting('lock_timeout');
    v_ignored text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'distlock needs READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    v_ignored := set_config('lock_timeout', p_bound, true);
    BEGIN
        SELECT * INTO r FROM "django_distlock_heldlock" l
            WHERE l.storage_key = p_storage_key FOR UPDATE;
        t := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
        IF r.storage_key IS NULL OR r.token <> p_token OR t >= r.free_at
                OR r.free_at = r.expires_at THEN
            v_answer := '["gone"]';
        ELSE
            v_expires := t + round(p_ttl * 1000000)::bigint;
            UPDATE "django_distlock_heldlock" l SET
                ttl = p_ttl, renewed_at = t, expires_at = v_expires,
                free_at = v_expires + round(p_grace * 1000000)::bigint
                WHERE l.storage_key = p_storage_key;
            IF current_setting('synchronous_commit') <> 'remote_apply' THEN
                v_ignored := set_config('synchronous_commit', 'on', true);
            END IF;
            v_answer := json_build_array(
                'extended', r.fence, r.acquired_at, v_expires, r.stop_requested_at IS NOT NULL
            );
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        v_answer := '["busy"]';
    END;
    v_ignored := set_config('lock_timeout', v_lock_timeout, true);
    RETURN v_answer;
END $body$;

CREATE OR REPLACE FUNCTION "django_distlock_heldlock_extend_many_v1"(
    p_storage_keys text[], p_tokens text[], p_ttls double precision[],
    p_grace double precision, p_bound text
) RETURNS text LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    t bigint;
    v_locked text[];
    v_answer json;
    v_lock_timeout text := current_setting('lock_timeout');
    v_ignored text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'distlock needs READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    v_ignored := set_config('lock_timeout', p_bound, true);
    BEGIN
        SELECT coalesce(array_agg(x.storage_key), '{}') INTO v_locked FROM (
            SELECT l.storage_key FROM "django_distlock_heldlock" l
                WHERE l.storage_key = ANY (p_storage_keys)
                ORDER BY l.storage_key FOR UPDATE SKIP LOCKED
        ) x;
        t := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
        WITH extended AS (
            UPDATE "django_distlock_heldlock" l SET
                ttl = g.ttl, renewed_at = t,
                expires_at = t + round(g.ttl * 1000000)::bigint,
                free_at = t + round(g.ttl * 1000000)::bigint + round(p_grace * 1000000)::bigint
            FROM unnest(p_storage_keys, p_tokens, p_ttls) g(storage_key, token, ttl)
            WHERE l.storage_key = g.storage_key AND l.token = g.token
                AND l.storage_key = ANY (v_locked)
                AND (l.free_at IS NULL OR (t < l.free_at AND l.free_at <> l.expires_at))
            RETURNING l.storage_key, l.token, json_build_array(
                'extended', l.fence, l.acquired_at, l.expires_at, l.stop_requested_at IS NOT NULL
            ) AS answer
        )
        SELECT json_agg(
            CASE
                WHEN e.token IS NOT NULL THEN e.answer
                WHEN g.storage_key <> ALL (v_locked) AND EXISTS (
                    SELECT FROM "django_distlock_heldlock" l
                        WHERE l.storage_key = g.storage_key AND l.token = g.token
                ) THEN '["busy"]'
                ELSE '["gone"]'
            END
            ORDER BY g.place
        ) INTO v_answer
        FROM unnest(p_storage_keys, p_tokens) WITH ORDINALITY g(storage_key, token, place)
        LEFT JOIN extended e ON e.storage_key = g.storage_key AND e.token = g.token;
        IF current_setting('synchronous_commit') <> 'remote_apply' THEN
            v_ignored := set_config('synchronous_commit', 'on', true);
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        SELECT json_agg('["busy"]'::json) INTO v_answer FROM unnest(p_tokens);
    END;
    v_ignored := set_config('lock_timeout', v_lock_timeout, true);
    RETURN v_answer;
END $body$;

CREATE OR REPLACE FUNCTION "django_distlock_heldlock_release_v1"(
    p_storage_key text, p_token text, p_held double precision, p_bound text
) RETURNS text LANGUAGE plpgsql VOLATILE AS $body$
DECLARE
    r record;
    t bigint;
    v_until bigint;
    v_outcome text := 'gone';
    v_lock_timeout text := current_setting('lock_timeout');
    v_ignored text := set_config('lock_timeout', p_bound, true);
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'distlock needs READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    BEGIN
        IF p_held IS NULL THEN
            DELETE FROM "django_distlock_heldlock" l
                WHERE l.storage_key = p_storage_key AND l.token = p_token
                    AND (l.free_at IS NULL OR l.free_at <> l.expires_at)
                RETURNING l.free_at INTO r;
            IF FOUND AND (r.free_at IS NULL
                    OR (date_part('epoch', clock_timestamp()) * 1000000)::bigint < r.free_at) THEN
                v_outcome := 'released';
            END IF;
            v_ignored := set_config('synchronous_commit', 'off', true);
        ELSE
            SELECT * INTO r FROM "django_distlock_heldlock" l
                WHERE l.storage_key = p_storage_key AND l.token = p_token FOR UPDATE;
            t := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
            v_until := r.acquired_at + round(p_held * 1000000)::bigint;
            IF r.storage_key IS NOT NULL
                    AND (r.free_at IS NULL OR (t < r.free_at AND r.free_at <> r.expires_at)) THEN
                UPDATE "django_distlock_heldlock" l SET expires_at = v_until, free_at = v_until
                    WHERE l.storage_key = p_storage_key AND t < v_until;
                IF NOT FOUND THEN
                    DELETE FROM "django_distlock_heldlock" l WHERE l.storage_key = p_storage_key;
                END IF;
                v_outcome := 'released';
            END IF;
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        v_outcome := 'busy';
    END;
    v_ignored := set_config('lock_timeout', v_lock_timeout, true);
    RETURN v_outcome;
END $body$;
