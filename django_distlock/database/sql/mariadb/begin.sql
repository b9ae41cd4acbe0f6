-- The beginning of each block. An error leaves no transaction open, and is raised again.
SET STATEMENT innodb_lock_wait_timeout = {bound}, lock_wait_timeout = {bound} FOR
BEGIN NOT ATOMIC
    DECLARE v_outcome VARCHAR(10) CHARACTER SET ascii;
    DECLARE t, v_last, v_paused_until, v_fence, v_held BIGINT;
    DECLARE h_fence, h_acquired_at, h_expires_at, h_free_at, h_stop, v_until BIGINT;
    DECLARE h_there, h_ours, h_wanted, v_shared BOOLEAN;
    DECLARE h_token VARCHAR(22) CHARACTER SET utf8mb4;
    DECLARE h_holder LONGTEXT CHARACTER SET utf8mb4;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
