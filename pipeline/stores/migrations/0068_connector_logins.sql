-- Logins of connectors that are bound to tenants (docs/adr/0071-connectors-by-tenant.md): what such a login reads, changes
-- and locks is of its own tenants. A login that is not bound reaches every row, as before.
CREATE TABLE connector_logins (
    login      name        NOT NULL,
    tenant     text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (login, tenant)
);

-- By the login itself, which no session can change. NULL: it is not bound.
CREATE FUNCTION connector_tenants() RETURNS text[]
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT array_agg(tenant) FROM connector_logins WHERE login = session_user
$$;
CREATE FUNCTION may_connect(of_tenant text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT coalesce(bool_or(tenant IS NOT DISTINCT FROM of_tenant), true) FROM connector_logins WHERE login = session_user
$$;

DO $$
DECLARE
    target text;
BEGIN
    FOREACH target IN ARRAY ARRAY[
        'connectors', 'connector_items', 'connector_sources', 'connector_asks', 'connector_groups', 'connector_principals',
        'connector_memory', 'connector_differences', 'uploads', 'webhooks', 'webhook_deliveries'
    ] LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', target);
        EXECUTE format(
            'CREATE POLICY rows_of_a_login ON %I USING ((SELECT connector_tenants()) IS NULL'
            ' OR tenant = ANY ((SELECT connector_tenants())::text[]))', target
        );
    END LOOP;
END $$;

-- What connectors may know of the ledger (0028, 0035, 0042).
DO $$
DECLARE
    part       record;
    definition text;
BEGIN
    FOR part IN SELECT * FROM (VALUES
        ('ledger_documents(text, text, uuid, integer)', 'one.tenant = of_tenant', 'may_connect(of_tenant)'),
        ('ledger_members(text, text, text, integer)', 'm.tenant = of_tenant', 'may_connect(of_tenant)'),
        ('ledger_lacks_members(text, text, text[])', 'm.tenant = of_tenant', 'may_connect(of_tenant)'),
        ('ledger_letters(uuid[])', 'l.document_id = ANY(ids)', 'may_connect(l.tenant)'),
        ('ledger_lacks(uuid[])', 'd.id = given.id', 'may_connect(d.tenant)'),
        ('ledger_lacks(uuid[])', 'l.document_id = given.id', 'may_connect(l.tenant)')
    ) f (name, condition, bound) LOOP
        definition := pg_get_functiondef(part.name::regprocedure);
        IF position(part.condition IN definition) = 0 THEN
            RAISE EXCEPTION '% has no condition %', part.name, part.condition;
        END IF;
        EXECUTE replace(definition, part.condition, part.condition || ' AND ' || part.bound);
    END LOOP;
END $$;

-- How much all tenants have uploaded together counts towards a quota.
CREATE FUNCTION uploads_usage(
    of_tenant text, OUT tenant_files bigint, OUT tenant_bytes numeric, OUT all_files bigint, OUT all_bytes numeric
) LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT count(*) FILTER (WHERE tenant = of_tenant AND may_connect(of_tenant)),
        coalesce(sum(size) FILTER (WHERE tenant = of_tenant AND may_connect(of_tenant)), 0), count(*),
        coalesce(sum(size), 0)
    FROM uploads WHERE deleted_at IS NULL
$$;

-- The locks of connectors. Only these functions take them (deploy/roles/postgres/1-roles.sql), so that a login holds none of
-- another tenant's instances: their numbers are those of the version before.
CREATE FUNCTION lead_connector(of_tenant text, of_source text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF may_connect(of_tenant) THEN
        RETURN pg_try_advisory_lock(7300008, hashtext(of_tenant || '/' || of_source));
    END IF;
    RAISE EXCEPTION 'the login % is not bound to tenant %', session_user, of_tenant
        USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE FUNCTION lock_uploads(of_tenant text, of_source text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF NOT may_connect(of_tenant) THEN
        RAISE EXCEPTION 'the login % is not bound to tenant %', session_user, of_tenant
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    PERFORM pg_advisory_xact_lock(7302, hashtext('instance ' || of_tenant || '/' || of_source));
END $$;
CREATE FUNCTION lock_uploads_quota() RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_advisory_xact_lock(7302, hashtext('quota'))
$$;

-- Webhooks are sent for all tenants: not by a login that is bound.
CREATE OR REPLACE FUNCTION lead_webhooks() RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT CASE WHEN connector_tenants() IS NULL THEN pg_try_advisory_lock(7300011) ELSE false END
$$;

CREATE FUNCTION bind_connectors(login text, VARIADIC tenants text[]) RETURNS void
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
    IF (SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE oid = role) OR EXISTS (
        SELECT FROM unnest(ARRAY['penstock_owner', 'penstock_operator', 'penstock_worker']) g (name)
        WHERE pg_has_role(role, to_regrole(g.name), 'MEMBER')
    ) THEN
        RAISE EXCEPTION '% may change the rows of every tenant: give its connectors a login of their own', login;
    END IF;
    DELETE FROM connector_logins c WHERE c.login = bind_connectors.login;
    INSERT INTO connector_logins (login, tenant) SELECT DISTINCT bind_connectors.login, unnest(tenants);
END $$;
CREATE FUNCTION unbind_connectors(login text) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, public, pg_temp AS $$
    DELETE FROM connector_logins c WHERE c.login = unbind_connectors.login
$$;
REVOKE EXECUTE ON FUNCTION uploads_usage, lead_connector, lock_uploads, lock_uploads_quota, bind_connectors,
    unbind_connectors FROM PUBLIC;
