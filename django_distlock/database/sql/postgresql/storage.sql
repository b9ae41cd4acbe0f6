-- A lock lasts for seconds and is extended in place: with room on the page, its update stays in the
-- page and does not touch the indexes (HOT). The table stays small however many locks pass through
-- it, so it is vacuumed after a fixed number of dead rows.
ALTER TABLE "django_distlock_heldlock" SET (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 1000
);
