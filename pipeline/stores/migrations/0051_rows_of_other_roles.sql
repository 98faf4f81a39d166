-- What one role writes, others read: a row of one process that was taken over must not keep other processes and operators from
-- reading all the rest (docs/security.md).

-- The trail: `penstock trail`, `trail verify` and `export` read every record.
CREATE FUNCTION trail.check_record() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NEW.number < 1 OR octet_length(NEW.mac) > 64
        OR array_ndims(NEW.access) > 1 OR array_position(NEW.access, NULL) IS NOT NULL OR cardinality(NEW.access) > 1000
        OR array_ndims(NEW.documents) > 1 OR array_position(NEW.documents, NULL) IS NOT NULL
        OR cardinality(NEW.documents) > 100000
        OR greatest(
            octet_length(NEW.tenant), octet_length(NEW.actor), octet_length(NEW.credential), octet_length(NEW.action),
            octet_length(NEW.object), octet_length(NEW.decision), octet_length(NEW.reason), octet_length(NEW.address),
            octet_length(NEW.request), octet_length(NEW.process), octet_length(NEW.key_id),
            (SELECT max(octet_length(a)) FROM unnest(NEW.access) a)
        ) > 2000  -- 500 characters
    THEN
        RAISE EXCEPTION 'this is no record of the audit trail' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
REVOKE EXECUTE ON FUNCTION trail.check_record FROM PUBLIC;
CREATE TRIGGER one_of_ours BEFORE INSERT ON trail.records FOR EACH ROW EXECUTE FUNCTION trail.check_record();

-- What a connector reports of itself: the metrics of all sources, `penstock status`, `why` and the page read it.
CREATE FUNCTION is_reported_time(given jsonb) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    moment text := given #>> '{}';
BEGIN
    IF jsonb_typeof(given) <> 'string'
        OR moment !~ '^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)$'
    THEN
        RETURN false;
    END IF;
    RETURN moment::timestamptz BETWEEN '2000-01-01Z' AND '3000-01-01Z';
EXCEPTION WHEN data_exception THEN
    RETURN false;  -- the 30th of February
END $$;

CREATE FUNCTION check_connector() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    report jsonb := jsonb_strip_nulls(jsonb_build_object(
        'activities', NEW.activities, 'counts', NEW.counts, 'problems', NEW.problems, 'guard', NEW.guard,
        'reconciliation', NEW.reconciliation));
    part   record;
BEGIN
    IF octet_length(report::text) > 1048576
        OR NOT coalesce(NEW.loaded_at BETWEEN '2000-01-01Z' AND '3000-01-01Z', true)
        OR NOT coalesce(NEW.removed_at BETWEEN '2000-01-01Z' AND '3000-01-01Z', true)
        OR NOT coalesce(NEW.seen_at BETWEEN '2000-01-01Z' AND '3000-01-01Z', true)
        OR (jsonb_typeof(report->'activities') = 'object' AND jsonb_typeof(report->'counts') = 'object'
            AND jsonb_typeof(report->'problems') = 'array') IS NOT TRUE
    THEN
        RAISE EXCEPTION 'this is no report of a connector' USING ERRCODE = 'check_violation';
    END IF;
    FOR part IN SELECT value FROM jsonb_each(report->'activities') LOOP
        IF jsonb_typeof(part.value) <> 'object' OR jsonb_typeof(part.value->'state') <> 'string'
            OR jsonb_typeof(part.value->'reason') <> 'string'
            OR NOT is_reported_time(part.value->'since') OR NOT is_reported_time(part.value->'succeeded_at')
        THEN
            RAISE EXCEPTION 'this is no activity of a connector' USING ERRCODE = 'check_violation';
        END IF;
    END LOOP;
    IF EXISTS (
        SELECT FROM jsonb_each(report->'counts') c WHERE jsonb_typeof(c.value) <> 'number' OR c.value::text !~ '^\d{1,18}$'
    ) OR EXISTS (
        SELECT FROM jsonb_array_elements(report->'problems') p
        WHERE (jsonb_typeof(p->'code') = 'string' AND jsonb_typeof(p->'message') = 'string') IS NOT TRUE
    ) OR report->'guard' IS NOT NULL AND (
        is_reported_time(report->'guard'->'at') AND jsonb_typeof(report->'guard'->'missing') = 'number'
        AND jsonb_typeof(report->'guard'->'published') = 'number'
    ) IS NOT TRUE OR report->'reconciliation' IS NOT NULL AND (
        is_reported_time(report->'reconciliation'->'at') AND jsonb_typeof(report->'reconciliation'->'found') = 'object'
        AND jsonb_typeof(report->'reconciliation'->'documents') = 'number'
        AND jsonb_typeof(report->'reconciliation'->'principals') = 'number'
    ) IS NOT TRUE THEN
        RAISE EXCEPTION 'this is no report of a connector' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
REVOKE EXECUTE ON FUNCTION check_connector, is_reported_time FROM PUBLIC;
CREATE TRIGGER one_of_ours BEFORE INSERT OR UPDATE ON connectors FOR EACH ROW EXECUTE FUNCTION check_connector();

-- Dead letters of forged records, whose header named a time that Python cannot read.
UPDATE dead_letters SET first_failed_at = at WHERE first_failed_at NOT BETWEEN '1971-01-01Z' AND '9998-12-31Z';
