-- Grant a key if it is free. Times are microseconds since 1970.
--
-- Answers a row: outcome, now, fence, acquired_at, expires_at, free_at, holder.
--
-- outcome   granted    now, fence, acquired_at, expires_at
--           contended  the lease: fence, acquired_at, expires_at, free_at, holder
--           paused     the same, if the key is held
--           again      granted, extended, released, marked or paused meanwhile; nothing was written
--           overflow   the key has used up its fences; nothing was written
--           shared     the key is shared, or was; nothing was written
--
-- With `again`, the token replaces itself, and does not get what it has settled.
--
-- A request to stop stays if a live lease keeps its holder, or is handed over, which settles it
-- first. A holder that replaces a dead one gets no request.
--
-- With `wanted`, the record that is in the way is marked: the process that ends it leaves the key to
-- others for a moment.
--
-- Locks are taken in the order fence row, lock row, here and everywhere, and the clock is read after
-- the last of them.
{begin}
    -- Read first, so that a refused caller takes no lock and writes nothing.
    SELECT c.fence, c.paused_until, c.closed_until IS NOT NULL, l.storage_key IS NOT NULL,
        l.token = %(replace)s AND (NOT %(again)s OR l.free_at IS NULL OR l.expires_at < l.free_at),
        l.token,
        l.fence, l.acquired_at, l.expires_at, l.free_at, l.wanted, l.holder
        INTO v_last, v_paused_until, v_shared, h_there, h_ours, h_token,
            h_fence, h_acquired_at, h_expires_at, h_free_at, h_wanted, h_holder
        FROM (SELECT 1) asked
        LEFT JOIN {fences} c ON c.storage_key = %(name)s
        LEFT JOIN {locks} l ON l.storage_key = %(name)s;
    SET t = {now};
    SET h_there = h_there AND (h_free_at IS NULL OR t < h_free_at);
    IF v_paused_until > t THEN
        SET v_outcome = 'paused';
    ELSEIF h_there AND h_ours IS NOT TRUE THEN
        SET v_outcome = 'contended';
    ELSEIF v_shared THEN
        SET v_outcome = 'shared';
    ELSE
        IF v_last IS NULL THEN
            -- Two sessions that lock a missing row lock the gap, and deadlock.
            INSERT INTO {fences} (storage_key, `key`, fence) VALUES (%(name)s, %(key)s, 0)
                ON DUPLICATE KEY UPDATE fence = fence;
        END IF;
        SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
        START TRANSACTION;
        -- Without a wait, because a guard may last as long as a transaction.
        SET STATEMENT innodb_lock_wait_timeout = 0 FOR
            SELECT c.fence, c.paused_until, c.closed_until IS NOT NULL
                INTO v_last, v_paused_until, v_shared
                FROM {fences} c WHERE c.storage_key = %(name)s FOR UPDATE;
        -- Waits for an extend or a release in flight.
        SELECT COUNT(*),
            MAX(l.token = %(replace)s
                AND (NOT %(again)s OR l.free_at IS NULL OR l.expires_at < l.free_at)),
            MAX(l.free_at) INTO h_there, h_ours, h_free_at
            FROM {locks} l WHERE l.storage_key = %(name)s FOR UPDATE;
        SET t = {now};
        SET v_fence = GREATEST(v_last + 1, %(floor)s * (t DIV 10));
        IF v_paused_until > t OR v_shared
                OR (h_there AND h_ours IS NOT TRUE AND (h_free_at IS NULL OR t < h_free_at)) THEN
            -- Granted, extended or paused since the look above.
            SET v_outcome = 'again';
        ELSEIF v_fence > {fence_max} THEN
            SET v_outcome = 'overflow';
        ELSE
            UPDATE {fences} SET fence = v_fence WHERE storage_key = %(name)s;
            IF h_there THEN
                SELECT MAX(l.stop_requested_at), MAX(l.renewed_until) INTO h_stop, v_until
                    FROM {locks} l
                    WHERE l.storage_key = %(name)s AND (l.free_at IS NULL OR t < l.free_at)
                        AND (l.expires_at = l.free_at OR l.holder = %(holder)s);
                UPDATE {locks} SET
                    token = %(token)s, fence = v_fence, ttl = %(ttl)s, acquired_at = t,
                    renewed_at = t, free_at = t + %(lasts)s + {grace},
                    expires_at = COALESCE(LEAST(t + %(lasts)s, v_until), t + %(lasts)s, v_until),
                    wanted = FALSE, holder = %(holder)s, holder_host = %(host)s,
                    task_id = %(task)s, stop_requested_at = h_stop, renewed_until = v_until
                    WHERE storage_key = %(name)s;
            ELSE
                INSERT INTO {locks} (
                    storage_key, `key`, token, fence, ttl, acquired_at, renewed_at, expires_at,
                    free_at, wanted, holder, holder_host, task_id, stop_requested_at
                ) VALUES (
                    %(name)s, %(key)s, %(token)s, v_fence, %(ttl)s, t, t, t + %(lasts)s,
                    t + %(lasts)s + {grace}, FALSE, %(holder)s, %(host)s, %(task)s, NULL
                );
            END IF;
            SET v_outcome = 'granted';
        END IF;
        IF v_outcome = 'granted' THEN COMMIT; ELSE ROLLBACK; END IF;
    END IF;
    IF v_outcome IN ('contended', 'paused') AND %(wanted)s AND h_there AND NOT h_wanted THEN
        UPDATE {locks} SET wanted = TRUE
            WHERE storage_key = %(name)s AND token = h_token AND NOT wanted;
        IF ROW_COUNT() = 0 THEN
            -- Released, or marked by another session, meanwhile.
            SET v_outcome = 'again';
        END IF;
    END IF;
    IF v_outcome = 'granted' THEN
        SELECT v_outcome, t, v_fence, t, t + %(lasts)s, NULL, NULL;
    ELSEIF h_there THEN
        SELECT v_outcome, t, h_fence, h_acquired_at, h_expires_at, h_free_at, h_holder;
    ELSE
        SELECT v_outcome, t, NULL, NULL, NULL, NULL, NULL;
    END IF;
END
