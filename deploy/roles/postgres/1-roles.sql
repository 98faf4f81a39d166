-- Run once in Penstock's database as an administrator of the server, before the first `penstock migrate`; repeating it is
-- harmless. The grants of each role are in 2-grants.sql. These roles are groups: each login is a member of one of them
-- (see docs/deploy.md), so that a login can be replaced without repeating the grants.
DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY[
        'penstock_owner', 'penstock_worker', 'penstock_analysis', 'penstock_connectors', 'penstock_query',
        'penstock_canaries', 'penstock_reader', 'penstock_trail_reader', 'penstock_operator'
    ] LOOP
        BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = wanted) THEN
                EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
            END IF;
        EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;  -- roles are shared by all databases of a server
        END;
    END LOOP;
    EXECUTE format('ALTER DATABASE %I OWNER TO penstock_owner', current_database());
    EXECUTE format('REVOKE ALL ON DATABASE %I FROM PUBLIC', current_database());
    EXECUTE format(
        'GRANT CONNECT ON DATABASE %I TO penstock_worker, penstock_analysis, penstock_connectors, penstock_query,'
        ' penstock_canaries, penstock_reader, penstock_trail_reader, penstock_operator',
        current_database()
    );
END $$;

-- pgvector is not a trusted extension: the owner of a database may not create it.
CREATE EXTENSION IF NOT EXISTS vector;

-- Postgres lets every login take advisory locks, with which our processes wait for each other, create large objects, and
-- write messages of any size into the write-ahead log. Readers by SQL (docs/readers.md) must write nothing and delay
-- nobody; and a query service or connector that was taken over must not keep detect from accepting revocations, so it takes
-- only the locks of its leaders (migration 0054), and connectors those of their instances (migration 0068).
-- Only a superuser may revoke these rights: without one, give readers a replica.
DO $$
DECLARE
    given regprocedure;
BEGIN
    IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
        RAISE NOTICE 'not a superuser: readers by SQL can still take advisory locks, make large objects and write WAL';
        RETURN;
    END IF;
    FOR given IN
        SELECT oid FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace
        AND (proname ~ '^pg_(try_)?advisory_(xact_)?lock'
            OR proname IN ('lo_creat', 'lo_create', 'lo_from_bytea', 'pg_logical_emit_message'))
    LOOP
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC, penstock_query, penstock_canaries, penstock_connectors,'
            ' penstock_analysis', given);
        IF given::text ~ '^pg_(try_)?advisory' THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO penstock_owner, penstock_worker, penstock_operator', given);
        END IF;
    END LOOP;
END $$;
