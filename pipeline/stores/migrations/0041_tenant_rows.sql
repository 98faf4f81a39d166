-- Rows divided by tenant in the server itself: a second line behind the conditions of our statements, and readers that
-- are bound to a tenant (docs/adr/0053-rows-by-tenant.md). Nothing is divided yet: divide_rows() does that.

-- Tables that whoever is in penstock_query reads across tenants, although their rows belong to tenants: progress and
-- differences are ids and numbers, connectors are the operators' (columns are granted one by one), and so are the golden
-- judgements. A migration that adds another replaces this function.
CREATE FUNCTION undivided_tables() RETURNS text[] LANGUAGE sql IMMUTABLE AS $$
    SELECT ARRAY['index_state', 'audit_differences', 'connectors', 'eval_queries']
$$;

-- Everybody sees every row, which costs nothing; but of those in penstock_query each sees the rows of the tenant that its
-- transaction names, and none where it names none. The setting is read once a statement, and compared as the statement's
-- own condition is: where both stand, the planner makes one of them.
-- OFFSET 0: asked by key for each row that is left, never as a join, which would change the plan around it. A document is
-- visible by its own policy; which one a chunk belongs to is the ledger's to say, and not its hint of access.
CREATE FUNCTION divide_table(target regclass) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    condition text;
BEGIN
    IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = target AND attname = 'tenant' AND NOT attisdropped) THEN
        condition := 'tenant = (SELECT current_setting(''penstock.tenant'', true))';
    ELSE
        condition := format('EXISTS (SELECT FROM public.documents d WHERE d.id = %s.document_id OFFSET 0)', target);
    END IF;
    EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', target);
    EXECUTE format('CREATE POLICY all_rows ON %s USING (true)', target);
    EXECUTE format(
        'CREATE POLICY rows_of_a_tenant ON %s AS RESTRICTIVE TO penstock_query USING (%s)', target, condition
    );
END $$;

-- Query services of the version before name no tenant: as long as one is connected, nothing is divided. (Theirs and the
-- workers' connections have one name, and only a query service's login is in penstock_query.)
CREATE FUNCTION query_services_of_before() RETURNS bigint LANGUAGE sql AS $$
    SELECT count(*) FROM pg_stat_activity a JOIN pg_roles r ON r.oid = a.usesysid
    WHERE a.datname = current_database() AND a.application_name = 'penstock' AND NOT r.rolsuper
      AND pg_has_role(r.oid, to_regrole('penstock_query'), 'MEMBER')
$$;

-- Divides at most so many of the tables that penstock_query may read and that are not divided yet; returns how many.
-- `penstock migrate` calls it until there are none, and 2-grants.sql, where roles and rights come after the tables.
-- Programs that know nothing of it then refuse to start: theirs would be a search that finds nothing.
CREATE FUNCTION divide_rows(most integer DEFAULT 1000) RETURNS integer LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    target  regclass;
    divided integer := 0;
BEGIN
    IF to_regrole('penstock_query') IS NULL THEN
        RETURN 0;  -- one login for everything, as on a developer's machine: nobody is held to anything
    END IF;
    FOR target IN
        SELECT c.oid::regclass FROM pg_class c
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relrowsecurity
          AND c.relname <> ALL (undivided_tables())
          AND has_any_column_privilege('penstock_query', c.oid, 'SELECT, INSERT, UPDATE')
          AND EXISTS (
            SELECT FROM pg_attribute a
            WHERE a.attrelid = c.oid AND a.attname IN ('tenant', 'document_id') AND NOT a.attisdropped
          )
        ORDER BY c.oid LIMIT most
    LOOP
        IF divided = 0 AND query_services_of_before() > 0 THEN
            RAISE WARNING 'rows are not divided by tenant yet: a query service of the version before is connected;'
                ' run `penstock migrate` again when all are of this one';
            RETURN 0;
        END IF;
        PERFORM divide_table(target);
        divided := divided + 1;
    END LOOP;
    IF divided > 0 THEN
        UPDATE schema_migrations SET needs = name WHERE name = '0041_tenant_rows' AND needs IS NULL;
    END IF;
    RETURN divided;
END $$;

-- Before a query service of the version before is started again (docs/upgrade.md).
CREATE FUNCTION undivide_rows() RETURNS integer LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    target  regclass;
    undone  integer := 0;
BEGIN
    FOR target IN SELECT polrelid::regclass FROM pg_policy WHERE polname = 'rows_of_a_tenant' LOOP
        EXECUTE format('DROP POLICY rows_of_a_tenant ON %s', target);
        EXECUTE format('DROP POLICY all_rows ON %s', target);
        EXECUTE format('ALTER TABLE %s DISABLE ROW LEVEL SECURITY', target);
        undone := undone + 1;
    END LOOP;
    UPDATE schema_migrations SET needs = NULL WHERE name = '0041_tenant_rows';
    RETURN undone;
END $$;

-- A generation's chunk table, as it is made: divided as the ledger is.
CREATE FUNCTION divide_as_documents(target regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT relrowsecurity FROM pg_class WHERE oid = 'documents'::regclass)
        AND NOT (SELECT relrowsecurity FROM pg_class WHERE oid = target)
    THEN
        PERFORM divide_table(target);
    END IF;
END $$;

REVOKE EXECUTE ON FUNCTION divide_table, query_services_of_before, divide_rows, undivide_rows, divide_as_documents
    FROM PUBLIC;

-- Whether this login is one that sees a tenant's rows alone.
CREATE FUNCTION is_held_to_a_tenant() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT coalesce((
        SELECT NOT rolsuper AND NOT rolbypassrls AND pg_has_role(oid, to_regrole('penstock_query'), 'MEMBER')
        FROM pg_roles WHERE rolname = session_user
    ), false)
$$;

-- The access sets that whoever holds these tags satisfies, one row for each of its tags that lets it in. A function,
-- because Postgres uses no index for `@>` below a policy (the operator is not leakproof); it holds to the tenant itself.
-- One index probe for each tag: acl_tags && tags compares each with each, 11 s for 5,000 tags against 200,000 sets (this
-- way 0.1 s). OFFSET 0: as a plain join it is planned as a scan of all sets for each tag (300 tags and 10,000 sets: 1 s
-- instead of 0.01). NOT IN over the CTE is hashed.
CREATE FUNCTION readable_sets(of_tenant text, tags text[])
RETURNS TABLE (id bigint, tag text, required_tags text[])
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    WITH mine AS MATERIALIZED (SELECT unnest(tags) AS tag)
    SELECT a.id, mine.tag, a.required_tags
    FROM mine CROSS JOIN LATERAL (
        SELECT s.id, s.tenant, s.required_tags FROM access_sets s WHERE s.acl_tags @> ARRAY[mine.tag] OFFSET 0
    ) a
    WHERE a.tenant = of_tenant
      AND (a.tenant = (SELECT current_setting('penstock.tenant', true)) OR NOT (SELECT is_held_to_a_tenant()))
      AND NOT EXISTS (SELECT FROM unnest(a.required_tags) needed WHERE needed NOT IN (SELECT m.tag FROM mine m))
$$;

-- What an answer was made from is not needed after so many days, whichever tenant it is of.
CREATE FUNCTION expire_provenance(days double precision, most integer) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    DELETE FROM answer_provenance WHERE (tenant, answer_id) IN (
        SELECT p.tenant, p.answer_id FROM answer_provenance p
        WHERE p.made_at < now() - make_interval(secs => greatest(days, 1) * 86400)
        ORDER BY p.made_at LIMIT most FOR UPDATE SKIP LOCKED
    )
$$;
REVOKE EXECUTE ON FUNCTION readable_sets, expire_provenance FROM PUBLIC;

-- What operators are shown of all tenants together (query/pipeline_parts.py): no title, no text, no address.
CREATE VIEW overview_documents AS SELECT id, source, external_id, lane, received_at, changed_at FROM documents;
CREATE VIEW overview_letters AS SELECT stage, code, at, replayed_at, dismissed_at FROM dead_letters;
CREATE FUNCTION overview_chunks(chunk_table text, ours uuid[], most integer, OUT of_ours bigint, OUT counted bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM generations g WHERE g.chunk_table = overview_chunks.chunk_table) THEN
        RAISE EXCEPTION 'no generation has this table';
    END IF;
    EXECUTE format(
        'SELECT (SELECT count(*) FROM %1$I WHERE document_id = ANY ($1)),'
        ' (SELECT count(*) FROM (SELECT FROM %1$I LIMIT $2) few)', chunk_table
    ) INTO of_ours, counted USING ours, most;
END $$;
REVOKE EXECUTE ON FUNCTION overview_chunks FROM PUBLIC;

-- Readers by SQL that are bound to one tenant (docs/readers.md): by the login itself, which no session can change, and
-- not by a setting, which everybody can. The schema has the names of `readers`, each for the login's tenant alone.
CREATE TABLE tenant_readers (
    reader     name PRIMARY KEY,            -- a login; not one in penstock_reader, which sees every tenant
    tenant     text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE SCHEMA tenant_readers;

CREATE FUNCTION tenant_readers.tenant() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT r.tenant FROM public.tenant_readers r WHERE r.reader = session_user
$$;

-- Barriers: what a reader's own conditions do, or say in an error, they do with rows of its tenant.
CREATE VIEW tenant_readers.generation WITH (security_barrier) AS
SELECT * FROM readers.generation WHERE tenant_readers.tenant() IS NOT NULL;
CREATE VIEW tenant_readers.documents WITH (security_barrier) AS
SELECT * FROM readers.documents WHERE tenant = (SELECT tenant_readers.tenant());

CREATE FUNCTION tenant_readers.access_of(principal text) RETURNS text[]
LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT readers.access_of(tenant_readers.tenant(), principal)
$$;
CREATE FUNCTION tenant_readers.nearest(query halfvec, tags text[], top integer DEFAULT 50)
RETURNS TABLE (id uuid, doc_id uuid, distance double precision)
LANGUAGE sql STABLE STRICT SECURITY DEFINER ROWS 50 SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT n.id, n.doc_id, n.distance FROM readers.nearest(query, tenant_readers.tenant(), tags, top) n
    ORDER BY n.distance, n.id
$$;
REVOKE EXECUTE ON FUNCTION tenant_readers.tenant, tenant_readers.access_of, tenant_readers.nearest FROM PUBLIC;

-- As in 0019, and the same for readers of one tenant.
CREATE OR REPLACE FUNCTION point_readers_at(chunk_table text, generation text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format($view$
        CREATE OR REPLACE VIEW readers.chunks AS
        SELECT c.id, c.document_id AS doc_id, array_position(m.chunk_ids, c.id) - 1 AS chunk_index, c.text,
               m.token_counts[array_position(m.chunk_ids, c.id)] AS token_count, a.acl_tags, a.required_tags,
               d.tenant, d.source_url, c.created_at, c.embedding::halfvec AS embedding,
               d.source, d.external_id, d.title, m.headings -> (array_position(m.chunk_ids, c.id) - 1) AS headings
        FROM %I c
        JOIN documents d ON d.id = c.document_id
        JOIN access_sets a ON a.id = d.access_id
        JOIN manifests m ON m.document_id = d.id AND m.generation = %L AND m.chunk_ids @> ARRAY[c.id]
        WHERE d.deleted_at IS NULL AND d.version IS NOT NULL AND cardinality(a.acl_tags) > 0
          AND NOT starts_with(d.source, 'canary.')
    $view$, chunk_table, generation);
    GRANT SELECT ON readers.chunks TO penstock_reader;
    CREATE OR REPLACE VIEW tenant_readers.chunks WITH (security_barrier) AS
    SELECT * FROM readers.chunks WHERE tenant = (SELECT tenant_readers.tenant());
END $$;
SELECT point_readers_at(chunk_table, name) FROM generations WHERE state = 'active';

CREATE FUNCTION bind_reader(reader text, tenant text) RETURNS void LANGUAGE plpgsql AS $$
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
        SELECT FROM unnest(ARRAY['penstock_owner', 'penstock_worker', 'penstock_query', 'penstock_reader',
            'penstock_trail_reader']) g (name)
        WHERE pg_has_role(login, to_regrole(g.name), 'MEMBER')
    ) THEN
        RAISE EXCEPTION '% is a superuser or in a role that sees every tenant: give its reader a role of its own', reader;
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

CREATE FUNCTION unbind_reader(reader text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    login regrole := to_regrole(quote_ident(reader));
BEGIN
    DELETE FROM public.tenant_readers t WHERE t.reader = unbind_reader.reader;
    IF login IS NOT NULL THEN
        EXECUTE format('REVOKE CONNECT ON DATABASE %I FROM %s', current_database(), login);
        EXECUTE format('REVOKE ALL ON SCHEMA tenant_readers FROM %s', login);
        EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA tenant_readers FROM %s', login);
        EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tenant_readers FROM %s', login);
    END IF;
END $$;
REVOKE EXECUTE ON FUNCTION bind_reader, unbind_reader FROM PUBLIC;
