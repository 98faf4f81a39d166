-- No login that may add to the audit trail can keep others from adding (docs/adr/0052-audit-trail.md): the numbers of
-- heads have no gap, a head is what every process can read, and nobody waits for an advisory lock, which any login that
-- can connect may hold.
CREATE FUNCTION trail.check_head() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    newest bigint := coalesce((SELECT max(h.number) FROM trail.heads h), 0);  -- the oldest go by age, the newest stays
BEGIN
    IF NEW.number IS DISTINCT FROM newest + 1 THEN
        RAISE EXCEPTION 'the next head of the audit trail is number %', newest + 1 USING ERRCODE = 'unique_violation';
    END IF;
    IF NEW.at NOT BETWEEN '2000-01-01Z' AND '3000-01-01Z' OR NEW.day NOT BETWEEN '2000-01-01' AND '3000-01-01'
        OR octet_length(NEW.digest) > 64 OR octet_length(NEW.mac) > 64 OR octet_length(NEW.key_id) > 64
    THEN
        RAISE EXCEPTION 'this is no head of the audit trail' USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
REVOKE EXECUTE ON FUNCTION trail.check_head FROM PUBLIC;
CREATE TRIGGER next_number BEFORE INSERT ON trail.heads FOR EACH ROW EXECUTE FUNCTION trail.check_head();

-- As it was, but for the lock: this one only the owner can take. ATTACH PARTITION takes it anyway.
CREATE OR REPLACE FUNCTION trail.prepare() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    today  date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    wanted date;
    name   text;
BEGIN
    LOCK TABLE ONLY trail.records IN SHARE UPDATE EXCLUSIVE MODE;
    FOR wanted IN SELECT today + i FROM generate_series(-1, 2) i LOOP
        name := 'records_' || to_char(wanted, 'YYYYMMDD');
        IF to_regclass('trail.' || name) IS NULL THEN
            EXECUTE format('CREATE TABLE trail.%I (LIKE trail.records INCLUDING ALL)', name);
            EXECUTE format('ALTER TABLE trail.records ATTACH PARTITION trail.%I FOR VALUES FROM (%L) TO (%L)',
                name, wanted, wanted + 1);
        END IF;
    END LOOP;
END $$;
