-- The secret of the numbers and channels of these locks: 244 bits, made once, kept by `flush`, and
-- readable only by the roles that are granted SELECT.
CREATE TABLE IF NOT EXISTS "django_distlock_heldlock_salt" (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    seed text NOT NULL
);

REVOKE ALL ON "django_distlock_heldlock_salt" FROM PUBLIC;

INSERT INTO "django_distlock_heldlock_salt" (seed) VALUES (
    pg_catalog.gen_random_uuid()::text || pg_catalog.gen_random_uuid()::text
) ON CONFLICT DO NOTHING;

-- The last grant of each session with a session lock; pg_locks says whether it still holds that. A
-- crash ends the sessions and empties the table.
CREATE UNLOGGED TABLE IF NOT EXISTS "django_distlock_heldlock_session" (
    pid integer PRIMARY KEY,
    storage_key text COLLATE "C" NOT NULL,
    fence bigint NOT NULL,
    stop_requested_at bigint
) WITH (fillfactor = 50);

REVOKE ALL ON "django_distlock_heldlock_session" FROM PUBLIC;
