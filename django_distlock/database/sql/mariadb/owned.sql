    -- Whether a lease has this token, and is neither expired nor settled. Its row is locked before
    -- the clock is read, so that no wait follows.
    SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
    START TRANSACTION;
    SELECT COUNT(*), MAX(l.token = %(token)s), MAX(l.fence), MAX(l.acquired_at), MAX(l.expires_at),
        MAX(l.free_at), MAX(l.stop_requested_at), MAX(l.wanted), MAX(l.renewed_until)
        INTO h_there, h_ours, h_fence, h_acquired_at, h_expires_at, h_free_at, h_stop, h_wanted,
            v_until
        FROM {locks} l WHERE l.storage_key = %(name)s FOR UPDATE;
    SET t = {now};
    SET h_ours = COALESCE(
        h_ours AND (h_free_at IS NULL OR (t < h_free_at AND h_free_at <> h_expires_at)), FALSE
    );
