-- bind_reader refuses every login with rights beyond its tenant (docs/readers.md). Before, it knew five roles alone: a login
-- in penstock_operator, in pg_read_all_data or with rights of its own on our tables was bound, and read every tenant.
-- The rights are examined when the login is bound: whoever grants it more afterwards undoes the binding.
CREATE OR REPLACE FUNCTION bind_reader(reader text, tenant text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    login regrole := to_regrole(quote_ident(reader));
BEGIN
    IF login IS NULL THEN
        RAISE EXCEPTION 'there is no role %: CREATE ROLE % LOGIN PASSWORD …, then bind it', reader, quote_ident(reader);
    END IF;
    IF coalesce(tenant, '') = '' THEN
        RAISE EXCEPTION 'a reader is bound to a tenant: name one';
    END IF;
    IF EXISTS (
        SELECT FROM pg_roles r WHERE r.oid = login
        AND (r.rolsuper OR r.rolbypassrls OR r.rolcreaterole OR r.rolreplication)
    ) OR EXISTS (  -- the roles of ours and of the server (pg_read_all_data and others)
        SELECT FROM pg_roles r
        WHERE (starts_with(r.rolname, 'pg_') OR r.rolname IN ('penstock_owner', 'penstock_operator', 'penstock_worker',
            'penstock_connectors', 'penstock_query', 'penstock_reader', 'penstock_trail_reader'))
          AND pg_has_role(login, r.oid, 'MEMBER')
    ) THEN
        RAISE EXCEPTION '% is a superuser or in a role that sees every tenant: give its reader a role of its own', reader;
    END IF;
    IF EXISTS (
        SELECT FROM pg_class c
        WHERE c.relnamespace IN (SELECT oid FROM pg_namespace WHERE nspname IN ('public', 'readers', 'trail'))
          AND c.relkind IN ('r', 'p', 'v', 'm') AND has_any_column_privilege(login, c.oid, 'SELECT')
          AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'e')  -- of an extension
    ) THEN
        RAISE EXCEPTION '% may read tables or views of every tenant: give its reader a role of its own', reader;
    END IF;
    IF to_regclass('tenant_readers.chunks') IS NULL THEN
        RAISE EXCEPTION 'there is no generation yet: run `penstock migrate`';
    END IF;
    INSERT INTO public.tenant_readers AS t (reader, tenant) VALUES (bind_reader.reader, bind_reader.tenant)
    ON CONFLICT ON CONSTRAINT tenant_readers_pkey DO UPDATE SET tenant = excluded.tenant;
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO %s', current_database(), login);
    EXECUTE format('GRANT USAGE ON SCHEMA tenant_readers TO %s', login);
    EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA tenant_readers TO %s', login);
    EXECUTE format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA tenant_readers TO %s', login);
END $$;
