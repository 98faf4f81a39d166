-- Detect takes the lock of generations for every batch: whoever holds it keeps all tenants' access as it was. So the logins of
-- the query service and of the connectors, which read what strangers write, take no lock with a number of one part but those of
-- their own leaders (deploy/roles/postgres/1-roles.sql).
CREATE FUNCTION lead_query_service(lock bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF lock IN (7300009, 7300010) THEN  -- the evaluation, the canaries
        RETURN pg_try_advisory_lock(lock);
    END IF;
    RAISE EXCEPTION 'the query service has no such leader' USING ERRCODE = 'insufficient_privilege';
END $$;
REVOKE EXECUTE ON FUNCTION lead_query_service FROM PUBLIC;

CREATE FUNCTION lead_webhooks() RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$ SELECT pg_try_advisory_lock(7300011) $$;
REVOKE EXECUTE ON FUNCTION lead_webhooks FROM PUBLIC;
