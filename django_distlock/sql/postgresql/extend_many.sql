-- Extend several leases at once, each by its own ttl. Rows are locked in the order of their keys,
-- and a row that somebody holds is skipped: no lease waits on behalf of another. The rows of the
-- answer are in the order of the question, and the outcomes are those of the function for one lease.
CREATE OR REPLACE FUNCTION "django_distlock_heldlock_extend_many_v1"(
    p_storage_keys text[], p_tokens text[], p_ttls double precision[],
    p_grace double precision, p_lock_ms integer
) RETURNS TABLE (
    outcome text, fence bigint, acquired_at bigint, expires_at bigint, stop_requested boolean
) LANGUAGE plpgsql VOLATILE AS $body$
#variable_conflict use_column
DECLARE
    t bigint;
    v_locked text[];
    v_lock_timeout text := current_setting('lock_timeout');
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'distlock needs READ COMMITTED' USING ERRCODE = '25001';
    END IF;
    -- Rows are skipped, but somebody may hold the table.
    PERFORM set_config('lock_timeout', greatest(p_lock_ms, 1)::text, true);
    BEGIN
        SELECT coalesce(array_agg(x.storage_key), '{}') INTO v_locked FROM (
            SELECT l.storage_key FROM "django_distlock_heldlock" l
                WHERE l.storage_key = ANY (p_storage_keys)
                ORDER BY l.storage_key FOR UPDATE SKIP LOCKED
        ) x;
        t := floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
        RETURN QUERY
            WITH extended AS (
                UPDATE "django_distlock_heldlock" l SET
                    ttl = g.ttl, renewed_at = t,
                    expires_at = t + round(g.ttl * 1000000)::bigint,
                    free_at = t + round(g.ttl * 1000000)::bigint
                        + round(p_grace * 1000000)::bigint
                FROM unnest(p_storage_keys, p_tokens, p_ttls) g(storage_key, token, ttl)
                WHERE l.storage_key = g.storage_key AND l.token = g.token
                    AND l.storage_key = ANY (v_locked)
                    AND (l.free_at IS NULL OR (t < l.free_at AND l.free_at <> l.expires_at))
                RETURNING l.storage_key, l.token, l.fence, l.acquired_at, l.expires_at,
                    l.stop_requested_at IS NOT NULL AS stop_requested
            )
            SELECT
                CASE
                    WHEN e.token IS NOT NULL THEN 'extended'
                    WHEN g.storage_key = ANY (v_locked) THEN 'gone'
                    WHEN EXISTS (
                        SELECT FROM "django_distlock_heldlock" l
                            WHERE l.storage_key = g.storage_key AND l.token = g.token
                    ) THEN 'busy'
                    ELSE 'gone'
                END,
                e.fence, e.acquired_at, e.expires_at, e.stop_requested
            FROM unnest(p_storage_keys, p_tokens) WITH ORDINALITY g(storage_key, token, place)
            LEFT JOIN extended e ON e.storage_key = g.storage_key AND e.token = g.token
            ORDER BY g.place;
        IF current_setting('synchronous_commit') <> 'remote_apply' THEN
            PERFORM set_config('synchronous_commit', 'on', true);
        END IF;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        RETURN QUERY SELECT 'busy', NULL::bigint, NULL::bigint, NULL::bigint, NULL::boolean
            FROM unnest(p_tokens);
    END;
    PERFORM set_config('lock_timeout', v_lock_timeout, true);
END $body$;
