-- Tables for a month ahead instead of two days, and no lock where none is missing: whoever takes it and never ends the
-- transaction keeps others from adding a day, which is noticed long before that day.
CREATE OR REPLACE FUNCTION trail.prepare() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    today  date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    wanted date;
    name   text;
BEGIN
    PERFORM FROM generate_series(-1, 30) i
        WHERE to_regclass('trail.records_' || to_char(today + i, 'YYYYMMDD')) IS NULL;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    LOCK TABLE ONLY trail.records IN SHARE UPDATE EXCLUSIVE MODE;
    FOR wanted IN SELECT today + i FROM generate_series(-1, 30) i LOOP
        name := 'records_' || to_char(wanted, 'YYYYMMDD');
        IF to_regclass('trail.' || name) IS NULL THEN
            EXECUTE format('CREATE TABLE trail.%I (LIKE trail.records INCLUDING ALL)', name);
            EXECUTE format('ALTER TABLE trail.records ATTACH PARTITION trail.%I FOR VALUES FROM (%L) TO (%L)',
                name, wanted, wanted + 1);
        END IF;
    END LOOP;
END $$;
SELECT trail.prepare();
