-- A login of the canary's own: it published and searched with the query service's, and whoever took it over read every
-- tenant. Members of penstock_canaries read what canaries are made of, and no row of another source. A table without the
-- policy is not readable to them at all, so that nothing is shown while rows are not divided (0041).
-- Existing logins keep what they have: a canary whose login is in penstock_query works as before (docs/upgrade.md).

CREATE FUNCTION bind_canaries_to(target regclass) RETURNS void LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    condition text;
BEGIN
    IF to_regrole('penstock_canaries') IS NULL THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = target AND attname = 'source' AND NOT attisdropped) THEN
        condition := 'starts_with(source, ''canary.'')';
    ELSIF EXISTS (SELECT FROM pg_attribute WHERE attrelid = target AND attname = 'acl_tags' AND NOT attisdropped) THEN
        condition := 'starts_with(acl_tags[1], ''canary.'')';  -- all tags of a set are of one source
    ELSE
        condition := format('EXISTS (SELECT FROM public.documents d WHERE d.id = %s.document_id OFFSET 0)', target);
    END IF;
    EXECUTE format(
        'CREATE POLICY rows_of_canaries ON %s AS RESTRICTIVE TO penstock_canaries USING (%s)', target, condition
    );
    EXECUTE format('GRANT SELECT ON %s TO penstock_canaries', target);
END $$;

-- Binds at most so many of the tables that are divided; returns how many. `documents` comes first, because others ask it.
CREATE FUNCTION bind_canaries(most integer DEFAULT 1000) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    target regclass;
    bound  integer := 0;
BEGIN
    IF to_regrole('penstock_canaries') IS NULL THEN
        RETURN 0;
    END IF;
    FOR target IN
        SELECT c.oid::regclass FROM pg_class c
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND c.relrowsecurity
          AND (c.relname IN ('documents', 'access_sets', 'manifests', 'connector_freshness')
            OR c.relname IN (SELECT g.chunk_table FROM generations g))
          AND NOT EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid AND p.polname = 'rows_of_canaries')
        ORDER BY c.relname <> 'documents', c.oid LIMIT most
    LOOP
        PERFORM bind_canaries_to(target);
        bound := bound + 1;
    END LOOP;
    RETURN bound;
END $$;
REVOKE EXECUTE ON FUNCTION bind_canaries_to, bind_canaries FROM PUBLIC;

-- As in 0041 and 0067; tables that are divided already are bound too, and count.
DO $$
DECLARE
    definition text := pg_get_functiondef('divide_rows(integer)'::regprocedure);
    ending     text := 'RETURN divided;';
BEGIN
    IF position(ending IN definition) = 0 THEN
        RAISE EXCEPTION 'divide_rows has no ending %', ending;
    END IF;
    EXECUTE replace(definition, ending, 'RETURN divided + bind_canaries(most - divided);');
END $$;

CREATE OR REPLACE FUNCTION undivide_rows() RETURNS integer LANGUAGE plpgsql SET lock_timeout = '500ms' AS $$
DECLARE
    target  regclass;
    undone  integer := 0;
BEGIN
    FOR target IN SELECT polrelid::regclass FROM pg_policy WHERE polname = 'rows_of_canaries' LOOP
        EXECUTE format('REVOKE ALL ON %s FROM penstock_canaries', target);  -- before its rows are visible
        EXECUTE format('DROP POLICY rows_of_canaries ON %s', target);
    END LOOP;
    FOR target IN SELECT polrelid::regclass FROM pg_policy WHERE polname = 'rows_of_a_tenant' LOOP
        EXECUTE format('DROP POLICY rows_of_a_tenant ON %s', target);
        EXECUTE format('DROP POLICY all_rows ON %s', target);
        EXECUTE format('ALTER TABLE %s DISABLE ROW LEVEL SECURITY', target);
        undone := undone + 1;
    END LOOP;
    UPDATE schema_migrations SET needs = NULL WHERE name = '0041_tenant_rows';
    RETURN undone;
END $$;

CREATE OR REPLACE FUNCTION divide_as_documents(target regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT relrowsecurity FROM pg_class WHERE oid = 'documents'::regclass)
        AND NOT (SELECT relrowsecurity FROM pg_class WHERE oid = target)
    THEN
        PERFORM divide_table(target);
        IF EXISTS (
            SELECT FROM pg_policy WHERE polrelid = 'documents'::regclass AND polname = 'rows_of_canaries'
        ) THEN
            PERFORM bind_canaries_to(target);
        END IF;
    END IF;
END $$;

-- Whether this login is one that sees canaries alone.
CREATE FUNCTION is_held_to_canaries() RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT coalesce((
        SELECT NOT rolsuper AND NOT rolbypassrls AND pg_has_role(oid, to_regrole('penstock_canaries'), 'MEMBER')
        FROM pg_roles WHERE rolname = session_user
    ), false)
$$;

-- It reads access sets as their owner: a canary learns nothing of tags that are none of its own.
DO $$
DECLARE
    definition text := pg_get_functiondef('readable_sets(text, text[])'::regprocedure);
    condition  text := 'WHERE a.tenant = of_tenant';
BEGIN
    IF position(condition IN definition) = 0 THEN
        RAISE EXCEPTION 'readable_sets has no condition %', condition;
    END IF;
    EXECUTE replace(definition, condition,
        condition || ' AND (NOT (SELECT is_held_to_canaries()) OR starts_with(mine.tag, ''canary.''))');
END $$;

-- A canary leads the canaries, and keeps no evaluation from running.
CREATE OR REPLACE FUNCTION lead_query_service(lock bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF lock = 7300010 OR (lock = 7300009 AND NOT is_held_to_canaries()) THEN  -- the canaries, the evaluation
        RETURN pg_try_advisory_lock(lock);
    END IF;
    RAISE EXCEPTION 'the query service has no such leader' USING ERRCODE = 'insufficient_privilege';
END $$;
