-- Grant several keys, or none of them. The order of p_storage_keys is the order of locking: first
-- advisory(key) of each key, then fence row and lock row of each. The rest is for all keys.
--
-- Answers a JSON array: place, answer. Place 0: an array with the answer of the function for an
-- acquire for each key, which is granted. Else: that answer for the key at this place, which is not
-- granted; then nothing was written.
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_acquire_many_v3"(
    p_storage_keys text[], p_keys text[], p_tokens text[], p_places text[],
    p_ttl double precision, p_grace double precision, p_holder jsonb,
    p_floor boolean, p_bound bigint, p_permits integer, p_door bigint
) RETURNS text LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
-- Otherwise, a session that planned this while the table was small would read all of it, until the
-- table is analysed.
SET seq_page_cost = 100 AS $body$
DECLARE
    v_alone boolean := p_permits IS NOT DISTINCT FROM 1;
    v_until timestamptz := pg_catalog.clock_timestamp() + p_bound * interval '1 millisecond';
    v_left bigint;
    v_bound text := greatest(p_bound, 1)::text;
    v_seed text;
    v_turn bigint;
    v_at integer := 0;
    v_place integer;
    v_answer text;
    v_answers text[] := '{}';
    t bigint;
    v_lock_timeout text := pg_catalog.current_setting('lock_timeout');
    v_ignored text := pg_catalog.set_config('lock_timeout', v_bound, true);
BEGIN
    {require_isolation}
    BEGIN
        -- Look first: whoever loses takes no lock and writes nothing.
        t := {now};
        SELECT pg_catalog.array_position(p_storage_keys, (l.storage_key COLLATE "C")::text),
            pg_catalog.json_build_array(
                CASE WHEN EXISTS (
                    SELECT FROM "django_distlock_fencecounter" c
                        WHERE c.storage_key = l.storage_key AND c.paused_until > t
                ) THEN 'paused' ELSE 'contended' END,
                t, l.fence, l.acquired_at, l.expires_at, l.free_at, l.holder
            )::text
            INTO v_place, v_answer
            FROM "django_distlock_heldlock" l
            WHERE l.storage_key = ANY (p_storage_keys) AND (l.free_at IS NULL OR l.free_at > t)
            ORDER BY 1 LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'not all' USING ERRCODE = 'DLOCK';
        END IF;
        SELECT {seed} INTO v_seed FROM "django_distlock_heldlock_salt" s;
        {require_salt}
        WHILE v_at < pg_catalog.cardinality(p_storage_keys) LOOP
            v_at := v_at + 1;
            v_turn := {turn_of_seed};
            IF (CASE WHEN v_alone
                THEN pg_catalog.pg_try_advisory_xact_lock(v_turn)
                ELSE pg_catalog.pg_try_advisory_xact_lock_shared(v_turn)
            END) THEN
                CONTINUE;
            END IF;
            v_left := (pg_catalog.date_part(
                'epoch', v_until - pg_catalog.clock_timestamp()
            ) * 1000)::bigint;
            IF v_left <= 0 THEN
                RAISE lock_not_available;
            END IF;
            v_ignored := pg_catalog.set_config('lock_timeout', v_left::text, true);
            IF v_alone THEN
                PERFORM pg_catalog.pg_advisory_xact_lock(v_turn);
            ELSE
                PERFORM pg_catalog.pg_advisory_xact_lock_shared(v_turn);
            END IF;
        END LOOP;
        v_left := greatest(1, pg_catalog.date_part(
            'epoch', v_until - pg_catalog.clock_timestamp()
        ) * 1000)::bigint;
        v_ignored := pg_catalog.set_config('lock_timeout', v_left::text, true);
        -- All waits before the first grant: behind one, its lease would have lost a part.
        v_at := 0;
        WHILE v_at < pg_catalog.cardinality(p_storage_keys) LOOP
            v_at := v_at + 1;
            IF v_alone THEN
                -- A guard's FOR SHARE may stand for as long as a transaction: answer now.
                PERFORM FROM "django_distlock_fencecounter" c
                    WHERE c.storage_key = p_storage_keys[v_at] FOR NO KEY UPDATE NOWAIT;
            ELSE
                PERFORM FROM "django_distlock_fencecounter" c
                    WHERE c.storage_key = p_storage_keys[v_at] FOR NO KEY UPDATE;
            END IF;
            PERFORM FROM "django_distlock_heldlock" l
                WHERE l.storage_key = p_storage_keys[v_at] FOR UPDATE;
        END LOOP;
        v_at := 0;
        WHILE v_at < pg_catalog.cardinality(p_storage_keys) LOOP
            v_at := v_at + 1;
            v_place := v_at;
            v_answer := '["shared"]';
            IF v_alone THEN
                v_answer := "django_distlock_heldlock_acquire_v3"(
                    p_storage_keys[v_at], p_keys[v_at], p_tokens[v_at], p_ttl, p_grace, p_holder,
                    false, NULL, p_floor, v_left::text
                );
            END IF;
            IF v_answer::json->>0 = 'shared' THEN
                v_answer := "django_distlock_heldlock_share_v3"(
                    p_storage_keys[v_at], p_keys[v_at], p_tokens[v_at], p_ttl, p_grace, p_holder,
                    false, NULL, p_floor, v_left::text, p_places[v_at], p_permits, p_door
                );
            END IF;
            IF v_answer::json->>0 <> 'granted' THEN
                -- Undoes the grants before it, and leaves the answer as it is.
                RAISE EXCEPTION 'not all' USING ERRCODE = 'DLOCK';
            END IF;
            v_answers := pg_catalog.array_append(v_answers, v_answer);
        END LOOP;
        v_place := 0;
        v_answer := pg_catalog.concat('[', pg_catalog.array_to_string(v_answers, ','), ']');
    EXCEPTION
        WHEN lock_not_available OR deadlock_detected THEN
            v_place := greatest(v_at, 1);
            v_answer := pg_catalog.json_build_array('busy', t);
        WHEN SQLSTATE 'DLOCK' THEN
            NULL;
    END;
    -- A test case's transaction goes on behind us.
    v_ignored := pg_catalog.set_config('lock_timeout', v_lock_timeout, true);
    RETURN pg_catalog.concat('[', v_place, ',', v_answer, ']');
END $body$;
