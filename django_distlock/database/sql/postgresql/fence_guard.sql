-- A fence that was granted must never be granted again, not even after a change by hand.
CREATE OR REPLACE FUNCTION "django_distlock_fencecounter_guard_v1"() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $body$
BEGIN
    IF TG_OP = 'DELETE' THEN
        RAISE EXCEPTION 'fence counters are never deleted (key %)', OLD.key
            USING ERRCODE = 'restrict_violation',
                  HINT = 'A deleted counter would hand out the same fences again.';
    END IF;
    IF NEW.fence < OLD.fence OR NEW.storage_key <> OLD.storage_key THEN
        RAISE EXCEPTION 'a fence never goes back (key %, from % to %)', OLD.key, OLD.fence, NEW.fence
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $body$;

DROP TRIGGER IF EXISTS distlock_fence_guard ON "django_distlock_fencecounter";

CREATE TRIGGER distlock_fence_guard BEFORE UPDATE OR DELETE ON "django_distlock_fencecounter"
    FOR EACH ROW EXECUTE FUNCTION "django_distlock_fencecounter_guard_v1"();
