-- bind_connectors refuses every login with rights beyond its connectors: before, one in penstock_analysis or penstock_query was
-- bound, and read the texts of every tenant.
CREATE OR REPLACE FUNCTION bind_connectors(login text, VARIADIC tenants text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    role regrole := to_regrole(quote_ident(login));
BEGIN
    IF role IS NULL THEN
        RAISE EXCEPTION 'there is no role %', login;
    END IF;
    IF cardinality(tenants) = 0 OR array_position(tenants, NULL) IS NOT NULL OR '' = ANY (tenants) THEN
        RAISE EXCEPTION 'a login is bound to tenants: name them';
    END IF;
    IF (SELECT rolsuper OR rolbypassrls OR rolreplication FROM pg_roles WHERE oid = role) OR EXISTS (
        SELECT FROM pg_roles r
        WHERE (starts_with(r.rolname, 'pg_') OR r.rolname IN ('penstock_owner', 'penstock_operator', 'penstock_worker',
            'penstock_analysis', 'penstock_query', 'penstock_reader', 'penstock_trail_reader'))
          AND pg_has_role(role, r.oid, 'MEMBER')
    ) THEN
        RAISE EXCEPTION '% may read or change the rows of every tenant: give its connectors a login of their own', login;
    END IF;
    DELETE FROM connector_logins c WHERE c.login = bind_connectors.login;
    INSERT INTO connector_logins (login, tenant) SELECT DISTINCT bind_connectors.login, unnest(tenants);
END $$;

-- A bound login could record another tenant's document as published by itself, and learn in this way whether it exists and when
-- it was changed.
DO $$
DECLARE
    definition text := pg_get_functiondef('publication_is_applied(uuid, text, timestamptz)'::regprocedure);
    condition  text := 'FROM documents d WHERE d.id = document';
BEGIN
    IF position(condition IN definition) = 0 THEN
        RAISE EXCEPTION 'publication_is_applied has no condition %', condition;
    END IF;
    EXECUTE replace(definition, condition, condition || ' AND may_connect(d.tenant)');
END $$;
