-- Of each document also whose it is and whether it is deleted: a process whose login is held to one tenant finds by it
-- the canaries that a killed process has left, of all tenants. Columns of a view are added at its end.
CREATE OR REPLACE VIEW overview_documents AS
SELECT id, source, external_id, lane, received_at, changed_at, tenant, deleted_at FROM documents;

-- What `penstock budget` shows with the query service's login, which has no right on the table itself.
CREATE VIEW overview_use AS
SELECT tenant, caller, requests, tokens, money FROM query_use
WHERE span = 'day' AND since = date_trunc('day', clock_timestamp(), 'UTC');

-- What was used goes by age with its owner's rights, as in 0038: nobody else can unsay what was used today.
CREATE FUNCTION erase_use_by_age(days double precision, most integer) RETURNS SETOF integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    before timestamptz := clock_timestamp() - make_interval(secs => greatest(days, 1) * 86400);  -- never all
BEGIN
    RETURN QUERY DELETE FROM query_use WHERE (tenant, caller, span) IN (
        SELECT u.tenant, u.caller, u.span FROM query_use u WHERE u.since < before ORDER BY u.since LIMIT most
    ) RETURNING 1;
END $$;
REVOKE EXECUTE ON FUNCTION erase_use_by_age FROM PUBLIC;
