-- Lock keys for the caller's transaction. The order of p_storage_keys is the order of locking, and
-- p_shared says which of them are shared.
--
-- Answers a JSON array: outcome, now, fence, acquired_at, expires_at, free_at, holder, place. What is
-- left out at its end is null.
--
-- outcome   locked     until the transaction ends, or the savepoint around the call is rolled back
--           snapshot   the transaction may not see a lease that was granted since it began
--           contended  a lease holds the key at `place`: the other values are about the lease
--           paused     an operator paused the key at `place`
--           busy       the key at `place` could not be locked within p_bound milliseconds, or most
--                      of statement_timeout: a transaction holds it, an acquire is under way, or a
--                      table is locked
--           deadlock   the server found a circle of transactions that wait for each other
--
-- All outcomes but `locked` leave nothing locked. With p_keep, `contended` keeps what the call has
-- locked: nobody else is granted these keys meanwhile, and the next call tries again.
--
-- The advisory lock of a key is that of an acquire, so a lease and a transaction exclude each other:
-- a transaction that has it looks for a lease, and an acquire has it while it grants a lease. A guard
-- locks the row of the fence, and can only begin before the end of its lease.
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_transaction_lock_v3"(
    p_storage_keys text[], p_shared boolean[], p_tokens text[], p_bound bigint, p_keep boolean
) RETURNS text LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
-- Otherwise, a session that planned this while the table was small would read all of it, until the
-- table is analysed.
SET seq_page_cost = 100 AS $body$
DECLARE
    v_lock_timeout text := pg_catalog.current_setting('lock_timeout');
    -- The caller asks again on `busy`. A statement_timeout would abort its transaction.
    v_bound bigint := least(p_bound, nullif(pg_catalog.date_part(
        'epoch', pg_catalog.current_setting('statement_timeout')::interval
    ) * 800, 0)::bigint);
    v_until timestamptz := pg_catalog.clock_timestamp() + v_bound * interval '1 millisecond';
    v_left bigint;
    v_seed text;
    v_at integer := 0;
    v_place integer;
    v_shared boolean;
    v_locked boolean;
    v_outcome text := 'locked';
    v_ignored text;
    t bigint;
    h_fence bigint;
    h_acquired_at bigint;
    h_expires_at bigint;
    h_free_at bigint;
    h_holder jsonb;
BEGIN
    IF pg_catalog.current_setting('transaction_isolation') NOT LIKE 'read %' THEN
        -- An older snapshot would not show a lease that was granted while this waited.
        RETURN pg_catalog.json_build_array('snapshot');
    END IF;
    IF pg_catalog.current_setting('transaction_read_only') = 'on' THEN
        -- The server refuses row locks alone. On a standby, the numbers are no locks of the primary.
        RAISE EXCEPTION 'cannot lock keys in a read-only transaction' USING ERRCODE = '25006';
    END IF;
    BEGIN
        -- Also for tables that somebody has locked.
        v_ignored := pg_catalog.set_config('lock_timeout', greatest(v_bound, 1)::text, true);
        LOOP
            -- Those that are free, in one query, up to the first that is not: all, nearly always.
            SELECT s.seed, (
                    SELECT k.place
                        FROM pg_catalog.unnest(p_storage_keys) WITH ORDINALITY k(storage_key, place)
                        WHERE NOT CASE
                            WHEN k.place <= v_at THEN true
                            WHEN p_shared[k.place]
                                THEN pg_catalog.pg_try_advisory_xact_lock_shared({turn_of_row})
                            ELSE pg_catalog.pg_try_advisory_xact_lock({turn_of_row})
                        END LIMIT 1
                ) INTO v_seed, v_at
                FROM (
                    -- The mark tells these sessions from those that acquire a lease right now.
                    SELECT {seed} AS seed, pg_catalog.pg_advisory_xact_lock_shared({mark})
                        FROM "django_distlock_heldlock_salt" s
                ) s;
            {require_salt}
            EXIT WHEN v_at IS NULL;
            v_left := (pg_catalog.date_part(
                'epoch', v_until - pg_catalog.clock_timestamp()
            ) * 1000)::bigint;
            IF v_left <= 0 THEN
                RAISE lock_not_available;
            END IF;
            v_ignored := pg_catalog.set_config('lock_timeout', v_left::text, true);
            IF p_shared[v_at] THEN
                PERFORM pg_catalog.pg_advisory_xact_lock_shared({turn_of_seed});
            ELSE
                PERFORM pg_catalog.pg_advisory_xact_lock({turn_of_seed});
            END IF;
        END LOOP;
        IF v_left IS NOT NULL THEN
            -- What the waits above have left is for those below.
            v_left := greatest(1, pg_catalog.date_part(
                'epoch', v_until - pg_catalog.clock_timestamp()
            ) * 1000)::bigint;
            v_ignored := pg_catalog.set_config('lock_timeout', v_left::text, true);
        END IF;
        t := (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint;
        IF EXISTS (
            SELECT FROM "django_distlock_heldlock" l WHERE l.storage_key = ANY (p_storage_keys)
        ) OR EXISTS (
            SELECT FROM "django_distlock_fencecounter" c
                WHERE c.storage_key = ANY (p_storage_keys)
                    AND (c.paused_until > t OR c.closed_until IS NOT NULL OR {is_locked})
        ) THEN
            -- Waits for an extend in flight: what looks over may last. What is over since counts as
            -- held, here and below.
            PERFORM FROM "django_distlock_heldlock" l
                WHERE l.storage_key = ANY (p_storage_keys) AND l.free_at <= t FOR SHARE;
            SELECT l.fence, l.acquired_at, l.expires_at, l.free_at, l.holder,
                pg_catalog.array_position(p_storage_keys, (l.storage_key COLLATE "C")::text)
                INTO h_fence, h_acquired_at, h_expires_at, h_free_at, h_holder, v_place
                FROM "django_distlock_heldlock" l
                WHERE l.storage_key = ANY (p_storage_keys) AND (l.free_at IS NULL OR l.free_at > t)
                    AND NOT (l.token = ANY (p_tokens))
                ORDER BY l.free_at DESC LIMIT 1;
            IF FOUND THEN
                v_outcome := 'contended';
            ELSE
                SELECT min(
                        pg_catalog.array_position(p_storage_keys, (c.storage_key COLLATE "C")::text)
                    ) FILTER (WHERE c.paused_until > t),
                    pg_catalog.bool_or(c.closed_until IS NOT NULL),
                    pg_catalog.bool_or(c.closed_until IS NULL AND {is_locked})
                    INTO v_place, v_shared, v_locked
                    FROM "django_distlock_fencecounter" c
                    WHERE c.storage_key = ANY (p_storage_keys);
                IF v_place IS NOT NULL THEN
                    v_outcome := 'paused';
                ELSIF v_shared THEN
                    -- Leases share one of the keys, or did.
                    PERFORM FROM ROWS FROM (
                            pg_catalog.unnest(p_storage_keys), pg_catalog.unnest(p_shared)
                        ) k(storage_key, shared)
                        JOIN "django_distlock_fencecounter" c
                            ON c.storage_key = k.storage_key AND c.closed_until IS NOT NULL
                        JOIN "django_distlock_heldlock" l
                            ON l.storage_key >= pg_catalog.textcat(k.storage_key, '{place}')
                            AND l.storage_key < pg_catalog.textcat(k.storage_key, '{place_end}')
                        WHERE NOT k.shared AND l.free_at <= t FOR SHARE OF l;
                    SELECT l.fence, l.acquired_at, l.expires_at, l.free_at, l.holder, k.place
                        INTO h_fence, h_acquired_at, h_expires_at, h_free_at, h_holder, v_place
                        FROM ROWS FROM (
                            pg_catalog.unnest(p_storage_keys), pg_catalog.unnest(p_shared)
                        ) WITH ORDINALITY k(storage_key, shared, place)
                        JOIN "django_distlock_fencecounter" c
                            ON c.storage_key = k.storage_key AND c.closed_until IS NOT NULL
                        JOIN "django_distlock_heldlock" l
                            ON l.storage_key >= pg_catalog.textcat(k.storage_key, '{place}')
                            AND l.storage_key < pg_catalog.textcat(k.storage_key, '{place_end}')
                        WHERE NOT k.shared AND (l.free_at IS NULL OR l.free_at > t)
                            AND NOT (l.token = ANY (p_tokens))
                        ORDER BY l.free_at DESC LIMIT 1;
                    IF FOUND THEN
                        v_outcome := 'contended';
                    END IF;
                END IF;
            END IF;
        END IF;
        IF v_outcome = 'locked' AND v_locked THEN
            -- Waits for the guard of a lease that is over; one that shares its key has none. A guard
            -- of the caller's own lease, in another transaction, is not in the way.
            BEGIN
                FOR v_at IN
                    SELECT pg_catalog.array_position(
                            p_storage_keys, (c.storage_key COLLATE "C")::text
                        )
                        FROM "django_distlock_fencecounter" c
                        WHERE c.storage_key = ANY (p_storage_keys)
                            AND c.closed_until IS NULL AND c.xmax <> 0
                            AND NOT EXISTS (
                                SELECT FROM "django_distlock_heldlock" l
                                WHERE l.storage_key = c.storage_key AND l.token = ANY (p_tokens)
                            )
                        ORDER BY 1
                LOOP
                    PERFORM FROM "django_distlock_fencecounter" c
                        WHERE c.storage_key = p_storage_keys[v_at] FOR NO KEY UPDATE;
                END LOOP;
                -- Gives the rows back: none is guarded from here on, without a lease.
                RAISE EXCEPTION 'not guarded' USING ERRCODE = 'DLOCK';
            EXCEPTION WHEN SQLSTATE 'DLOCK' THEN
                NULL;
            END;
        END IF;
        IF v_outcome = 'paused' OR v_outcome = 'contended' AND NOT p_keep THEN
            -- Undoes the locks, and leaves the outcome as it is.
            RAISE EXCEPTION 'not locked' USING ERRCODE = 'DLOCK';
        END IF;
        v_ignored := pg_catalog.set_config('lock_timeout', v_lock_timeout, true);
    EXCEPTION
        WHEN lock_not_available THEN
            v_outcome := 'busy';
            v_place := greatest(v_at, 1);
        WHEN deadlock_detected THEN
            v_outcome := 'deadlock';
            v_place := greatest(v_at, 1);
        WHEN SQLSTATE 'DLOCK' THEN
            NULL;
    END;
    IF v_outcome = 'locked' THEN
        RETURN '["locked"]';
    END IF;
    RETURN pg_catalog.json_build_array(
        v_outcome, (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint,
        h_fence, h_acquired_at, h_expires_at, h_free_at, h_holder, v_place
    );
END $body$;
