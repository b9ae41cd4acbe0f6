-- Grant a key to a sharer, or exclusively where sharers may be in the way: the rule is `in_the_way`
-- in core/sharing.py. p_place is the name of the new record, p_permits the number of holders that the
-- key may have (null: any), p_door the microseconds for which nobody is granted the key shared after
-- an attempt of a waiter for the key alone.
--
-- Answers, arguments and the order of locks are those of the function for an acquire. A holder in the
-- way is told with whether it shares the key. Sharers share the advisory lock of the key, as transactions that share the key do. The row of the fence is locked
-- after it, by every session that adds a sharer.
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_share_v3"(
    p_storage_key text, p_key text, p_token text,
    p_ttl double precision, p_grace double precision, p_holder jsonb,
    p_wanted boolean, p_replace text, p_floor boolean, p_bound text,
    p_place text, p_permits integer, p_door bigint
) RETURNS text LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    v_alone boolean := p_permits IS NOT DISTINCT FROM 1;
    v_from text := pg_catalog.textcat(p_storage_key, '{place}');
    v_to text := pg_catalog.textcat(p_storage_key, '{place_end}');
    v_has_turn boolean := false;
    v_turn bigint;
    t bigint;
    v_now bigint;
    -- Of the key.
    v_last bigint;
    v_paused boolean;
    v_closed_until bigint;
    -- Of those who hold it, but for the places that the attempt may take.
    v_others bigint;
    v_has_place boolean;
    v_is_alone boolean;
    v_again boolean;
    v_unmarked boolean;
    v_marked bigint;
    -- Who is in the way: the one that is free last, or first.
    v_last_one boolean;
    v_until bigint;
    h record;
    v_called boolean;
    v_stop bigint;
    v_renewed_until bigint;
    v_outcome text;
    v_fence bigint;
    v_expires bigint;
    v_lock_timeout text := pg_catalog.current_setting('lock_timeout');
    v_ignored text := pg_catalog.set_config('lock_timeout', p_bound, true);
BEGIN
    {require_isolation}
    BEGIN
        LOOP
            t := {now};
            IF v_has_turn THEN
                -- Waits for an extend in flight of what is over by now, or replaced. What is over
                -- since counts as held.
                PERFORM FROM "django_distlock_heldlock" l
                    WHERE {of_key}
                        AND (
                            l.free_at <= t OR l.token = p_replace
                            OR NOT v_alone AND l.token = p_token
                        )
                    ORDER BY l.storage_key FOR UPDATE;
            END IF;
            SELECT c.fence, c.paused_until > t, c.closed_until
                INTO v_last, v_paused, v_closed_until
                FROM "django_distlock_fencecounter" c WHERE c.storage_key = p_storage_key;
            SELECT
                count(*) FILTER (WHERE NOT x.own),
                coalesce(pg_catalog.bool_or(x.own), false),
                coalesce(pg_catalog.bool_or(NOT x.own AND x.alone), false),
                coalesce(pg_catalog.bool_or(NOT x.own AND x.token = p_token), false),
                coalesce(pg_catalog.bool_or(NOT x.wanted), false)
                INTO v_others, v_has_place, v_is_alone, v_again, v_unmarked
                FROM (
                    SELECT l.token, l.wanted, l.storage_key = p_storage_key AS alone,
                        p_replace IS NOT NULL
                        AND (l.token = p_replace OR NOT v_alone AND l.token = p_token)
                        -- What this very token has settled it does not take.
                        AND NOT (
                            l.token = p_token AND l.free_at IS NOT NULL
                            AND l.free_at = l.expires_at
                        ) AS own
                    FROM "django_distlock_heldlock" l
                    WHERE {of_key}
                        AND (l.free_at IS NULL OR l.free_at > t)
                ) x;
            v_outcome := NULL;
            v_until := NULL;
            v_last_one := true;
            IF v_paused THEN
                v_outcome := 'paused';
            ELSIF NOT v_alone AND p_replace <> p_token AND NOT v_has_place THEN
                -- Others may have been there in between.
                v_outcome := 'contended';
            ELSIF v_others > 0 AND (v_alone OR v_is_alone) THEN
                v_outcome := 'contended';
            ELSIF v_alone OR v_has_place THEN
                NULL;
            ELSIF v_again OR v_others >= p_permits THEN
                v_outcome := 'contended';
                v_last_one := false;
            ELSIF v_closed_until > t THEN
                v_outcome := 'contended';
                v_until := v_closed_until;
            END IF;
            IF v_outcome IS NOT NULL AND NOT (
                p_wanted
                AND (v_unmarked OR v_alone AND coalesce(v_closed_until < t + p_door / 2, false))
            ) THEN
                -- Read first: whoever loses takes no lock, and writes what is new to its holders.
                EXIT;
            END IF;
            IF NOT v_has_turn THEN
                SELECT {turn} INTO v_turn FROM "django_distlock_heldlock_salt" s;
                {require_salt}
                IF v_alone THEN
                    PERFORM pg_catalog.pg_advisory_xact_lock(v_turn);
                ELSE
                    PERFORM pg_catalog.pg_advisory_xact_lock_shared(v_turn);
                END IF;
                IF v_last IS NULL THEN
                    INSERT INTO "django_distlock_fencecounter" (storage_key, key, fence)
                        VALUES (p_storage_key, p_key, 0) ON CONFLICT DO NOTHING;
                END IF;
                -- Others who share the key are soon done.
                PERFORM FROM "django_distlock_fencecounter" c
                    WHERE c.storage_key = p_storage_key FOR NO KEY UPDATE;
                v_has_turn := true;
                CONTINUE;
            END IF;
            IF v_outcome IS NOT NULL THEN
                WITH marked AS (
                    UPDATE "django_distlock_heldlock" l SET wanted = true
                        WHERE {of_key}
                            AND (l.free_at IS NULL OR l.free_at > t)
                        RETURNING 1
                ) SELECT count(*) INTO v_marked FROM marked;
                IF v_marked < v_others THEN
                    CONTINUE; -- One has ended meanwhile: look again.
                END IF;
                IF v_alone AND NOT v_is_alone THEN
                    UPDATE "django_distlock_fencecounter" c SET closed_until = t + p_door
                        WHERE c.storage_key = p_storage_key;
                END IF;
                -- Losing the marks in a crash costs one step of backoff.
                v_ignored := pg_catalog.set_config('synchronous_commit', 'off', true);
                EXIT;
            END IF;
            -- The clock after every wait, or a lease would come back with a part of it gone.
            v_now := {now};
            v_expires := v_now + pg_catalog.round(p_ttl * 1000000)::bigint;
            v_fence := greatest(v_last + 1, CASE WHEN p_floor THEN v_now / 10 ELSE 1 END);
            WITH gone AS (
                DELETE FROM "django_distlock_heldlock" l
                    WHERE {of_key}
                        AND (
                            l.free_at <= t OR p_replace IS NOT NULL
                            AND (l.token = p_replace OR NOT v_alone AND l.token = p_token)
                        )
                    RETURNING l.wanted, l.stop_requested_at, l.renewed_until,
                        (l.free_at IS NULL OR l.free_at > t)
                        AND (l.expires_at = l.free_at OR l.holder = p_holder) AS passed_on
            ) SELECT pg_catalog.bool_or(g.wanted),
                pg_catalog.min(g.stop_requested_at) FILTER (WHERE g.passed_on),
                pg_catalog.min(g.renewed_until) FILTER (WHERE g.passed_on)
                INTO v_called, v_stop, v_renewed_until FROM gone g;
            INSERT INTO "django_distlock_heldlock" (
                storage_key, key, token, fence, ttl, acquired_at, renewed_at, expires_at,
                free_at, wanted, holder, holder_host, task_id, stop_requested_at, renewed_until
            ) VALUES (
                p_place, p_key, p_token, v_fence, p_ttl, v_now, v_now,
                least(v_expires, v_renewed_until),
                v_expires + pg_catalog.round(p_grace * 1000000)::bigint, false,
                p_holder, p_holder->>'host', p_holder->>'task_id', v_stop, v_renewed_until
            );
            UPDATE "django_distlock_fencecounter" c SET
                fence = v_fence,
                closed_until = CASE WHEN NOT v_alone THEN coalesce(c.closed_until, 0) END
                WHERE c.storage_key = p_storage_key;
            IF v_called THEN
                -- Their mark goes with them, and they have to mark what comes.
                PERFORM pg_catalog.pg_notify({channel}, {called})
                    FROM "django_distlock_heldlock_salt" s;
            END IF;
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
    IF v_outcome = 'granted' THEN
        v_ignored := pg_catalog.set_config('lock_timeout', v_lock_timeout, true);
        RETURN pg_catalog.json_build_array(v_outcome, v_now, v_fence, v_now, v_expires);
    END IF;
    IF v_outcome <> 'overflow' THEN
        SELECT l.storage_key, l.fence, l.acquired_at, l.expires_at, l.free_at, l.holder INTO h
            FROM "django_distlock_heldlock" l
            WHERE {of_key}
                AND (l.free_at IS NULL OR l.free_at > t)
                AND (p_replace IS NULL OR l.token <> p_replace OR v_outcome = 'paused')
            ORDER BY CASE WHEN v_last_one THEN -1 ELSE 1 END
                * coalesce(l.free_at, 9223372036854775807)
            LIMIT 1;
        v_ignored := pg_catalog.set_config('lock_timeout', v_lock_timeout, true);
        IF FOUND THEN
            RETURN pg_catalog.json_build_array(
                v_outcome, t, h.fence, h.acquired_at, h.expires_at,
                least(h.free_at, v_until), h.holder, h.storage_key <> p_storage_key
            );
        END IF;
    END IF;
    v_ignored := pg_catalog.set_config('lock_timeout', v_lock_timeout, true);
    RETURN pg_catalog.json_build_array(v_outcome, t);
END $body$;
