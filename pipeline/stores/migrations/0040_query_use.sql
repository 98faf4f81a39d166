-- What tenants and callers have used of their budgets (docs/adr/0051-shares.md). One row each and span, begun anew with
-- each day or minute.
CREATE TABLE query_use (
    tenant   text             NOT NULL,
    caller   text             NOT NULL,  -- key:NAME, token:PRINCIPAL, development:PRINCIPAL; empty: the whole tenant
    span     text             NOT NULL CHECK (span IN ('day', 'minute')),
    since    timestamptz      NOT NULL,  -- the beginning of the day (UTC) or minute that the amounts are of
    requests double precision NOT NULL DEFAULT 0,  -- used, or given to a process in advance
    tokens   double precision NOT NULL DEFAULT 0,
    money    double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant, caller, span)
);
CREATE INDEX query_use_age ON query_use (since);

-- Takes in advance what is wanted, as far as there is any left, and adds what was used without. The amounts are
-- {requests, tokens, money}; spent is negative where a portion is given back, and counts only while its own span lasts.
-- most: NULL where there is no limit. A query service needs no other right: it cannot unsay what somebody used.
CREATE FUNCTION use_budget(
    of_tenant text, of_caller text, of_span text, spent_since timestamptz,
    spent double precision[], wanted double precision[], most double precision[],
    OUT began timestamptz, OUT given double precision[], OUT used double precision[]
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    known query_use;
BEGIN
    began := date_trunc(of_span, clock_timestamp(), 'UTC');
    INSERT INTO query_use (tenant, caller, span, since) VALUES (of_tenant, of_caller, of_span, began)
        ON CONFLICT DO NOTHING;
    SELECT * INTO known FROM query_use q
        WHERE (q.tenant, q.caller, q.span) = (of_tenant, of_caller, of_span) FOR UPDATE;
    began := greatest(began, known.since);
    given := '{0,0,0}';
    used := CASE WHEN known.since = began THEN ARRAY[known.requests, known.tokens, known.money] ELSE '{0,0,0}' END;
    FOR i IN 1..3 LOOP
        IF spent_since IS NULL OR spent_since = began THEN
            used[i] := greatest(0, used[i] + spent[i]);
        END IF;
        IF most[i] IS NOT NULL THEN
            given[i] := greatest(0, least(wanted[i], most[i] - used[i]));
        END IF;
        used[i] := used[i] + given[i];
    END LOOP;
    UPDATE query_use q SET since = began, requests = used[1], tokens = used[2], money = used[3]
        WHERE (q.tenant, q.caller, q.span) = (of_tenant, of_caller, of_span);
END $$;
REVOKE EXECUTE ON FUNCTION use_budget FROM PUBLIC;
