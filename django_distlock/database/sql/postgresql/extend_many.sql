-- Extend several leases in one call, each by its own ttl. Rows are locked in the order of their keys.
-- A row that another session has locked is skipped, so that no lease waits because of another. No
-- wake-up is sent, because a lease that is renewed by the ttl that it has ends later than before.
--
-- Answers a JSON array of the answers of the function for one lease, in the order of the arguments.
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_extend_many_v3"(
    p_storage_keys text[], p_tokens text[], p_ttls double precision[],
    p_grace double precision, p_bound text
) RETURNS text LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
-- Otherwise, a session that planned this while the table was small would read all of it, until the
-- table is analysed.
SET seq_page_cost = 100 AS $body$
DECLARE
    t bigint;
    v_grace bigint := pg_catalog.round(p_grace * 1000000)::bigint;
    v_locked text[];
    v_answer json;
    v_lock_timeout text := pg_catalog.current_setting('lock_timeout');
    v_ignored text;
BEGIN
    {require_isolation}
    -- Rows are skipped, but somebody may hold the table.
    v_ignored := pg_catalog.set_config('lock_timeout', p_bound, true);
    BEGIN
        SELECT coalesce(pg_catalog.array_agg(x.storage_key), '{}') INTO v_locked FROM (
            SELECT l.storage_key FROM "django_distlock_heldlock" l
                WHERE l.storage_key = ANY (p_storage_keys)
                ORDER BY l.storage_key FOR UPDATE SKIP LOCKED
        ) x;
        t := {now};
        WITH extended AS (
            UPDATE "django_distlock_heldlock" l SET
                ttl = g.ttl, renewed_at = t,
                expires_at = least(
                    t + pg_catalog.round(g.ttl * 1000000)::bigint, l.renewed_until
                ),
                free_at = t + pg_catalog.round(g.ttl * 1000000)::bigint + v_grace
            FROM ROWS FROM (
                pg_catalog.unnest(p_storage_keys), pg_catalog.unnest(p_tokens),
                pg_catalog.unnest(p_ttls)
            ) g(storage_key, token, ttl)
            WHERE l.storage_key = g.storage_key AND l.token = g.token
                AND l.storage_key = ANY (v_locked)
                AND (l.free_at IS NULL OR (t < l.free_at AND l.free_at <> l.expires_at))
                AND (l.renewed_until IS NULL OR t < l.renewed_until)
            RETURNING l.storage_key, l.token, pg_catalog.json_build_array(
                'extended', l.fence, l.acquired_at, l.free_at - v_grace,
                l.stop_requested_at IS NOT NULL
            ) AS answer
        )
        SELECT pg_catalog.json_agg(
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
        FROM ROWS FROM (
            pg_catalog.unnest(p_storage_keys), pg_catalog.unnest(p_tokens)
        ) WITH ORDINALITY g(storage_key, token, place)
        LEFT JOIN extended e ON e.storage_key = g.storage_key AND e.token = g.token;
        {durable}
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        SELECT pg_catalog.json_agg('["busy"]'::json) INTO v_answer FROM pg_catalog.unnest(p_tokens);
    END;
    v_ignored := pg_catalog.set_config('lock_timeout', v_lock_timeout, true);
    RETURN v_answer;
END $body$;
