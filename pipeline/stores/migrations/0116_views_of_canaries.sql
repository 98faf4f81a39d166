-- The canary's login read tables below a policy. Postgres compares texts before it looks at a policy, and EXPLAIN ANALYZE says
-- how many rows were left: titles, external ids and passages of other tenants could be read letter by letter, and estimates
-- came from the statistics of all tenants' rows. It reads these views instead (docs/adr/0125-views-of-canaries.md): they have the
-- names of the tables, which the canary's search_path puts before the tables themselves.
-- OFFSET 0 keeps every condition of a reader above the rows of canaries, and a barrier has no statistics.
CREATE SCHEMA canaries;

CREATE VIEW canaries.documents WITH (security_barrier) AS
SELECT id, tenant, access_id, external_id, source, title, source_url, author, media_type, source_modified_at, keys, version, seq,
       deleted_at
FROM public.documents WHERE external_id = 'canary' AND starts_with(source, 'canary.') OFFSET 0;

CREATE VIEW canaries.overview_canaries WITH (security_barrier) AS
SELECT id, tenant, source, deleted_at FROM canaries.documents;

CREATE VIEW canaries.access_sets WITH (security_barrier) AS
SELECT a.* FROM (SELECT DISTINCT access_id FROM canaries.documents) d
CROSS JOIN LATERAL (
    SELECT id, tenant, acl_tags, required_tags FROM public.access_sets s
    WHERE s.id = d.access_id AND starts_with(s.acl_tags[1], 'canary.') OFFSET 0
) a OFFSET 0;

CREATE VIEW canaries.manifests WITH (security_barrier) AS
SELECT m.* FROM canaries.documents d
CROSS JOIN LATERAL (
    SELECT document_id, generation, chunk_ids, token_counts, spans, headings FROM public.manifests m
    WHERE m.document_id = d.id OFFSET 0
) m OFFSET 0;

CREATE VIEW canaries.connector_freshness WITH (security_barrier) AS
SELECT * FROM public.connector_freshness WHERE starts_with(source, 'canary.') OFFSET 0;

-- Chunk tables come and go with their generations, which a view would keep them from: it asks this function, which reads the
-- table that has the name then. These columns of the passages of canaries.
CREATE FUNCTION canaries.passages(chunk_table text, columns text[]) RETURNS SETOF record
LANGUAGE plpgsql STABLE SECURITY DEFINER ROWS 500 SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM generations g WHERE g.chunk_table = passages.chunk_table) THEN
        RAISE EXCEPTION 'no generation has this table';
    END IF;
    RETURN QUERY EXECUTE format(
        'SELECT c.* FROM canaries.documents d CROSS JOIN LATERAL (SELECT %s FROM public.%I WHERE document_id = d.id OFFSET 0) c',
        (SELECT string_agg(quote_ident(n), ', ' ORDER BY place) FROM unnest(columns) WITH ORDINALITY c (n, place)), chunk_table
    );
END $$;

-- The view of a chunk table. ctid: a scan by sketches names rows by their places.
CREATE FUNCTION show_canaries_of(target regclass) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    called  name := (SELECT relname FROM pg_class WHERE oid = target);
    columns text[];
    types   text;
BEGIN
    SELECT array_agg(a.attname ORDER BY a.attnum), string_agg(
        format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY a.attnum
    ) INTO columns, types
    FROM pg_attribute a WHERE a.attrelid = target AND NOT a.attisdropped AND (a.attnum > 0 OR a.attname = 'ctid');
    EXECUTE format(  -- another table may have had the name
        'DROP VIEW IF EXISTS canaries.%1$I; CREATE VIEW canaries.%1$I WITH (security_barrier) AS'
        ' SELECT * FROM canaries.passages(%1$L, %2$L) AS passages (%3$s)',
        called, columns, types
    );
    IF to_regrole('penstock_canaries') IS NOT NULL THEN
        EXECUTE format('GRANT SELECT ON canaries.%I TO penstock_canaries', called);
    END IF;
END $$;
REVOKE EXECUTE ON FUNCTION canaries.passages, show_canaries_of FROM PUBLIC;

-- As in 0111; each chunk table gets its view as it is made, whether or not rows are divided.
CREATE OR REPLACE FUNCTION divide_as_documents(target regclass) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM show_canaries_of(target);
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

-- The policies stay, for a login that is granted a table by mistake; they grant nothing any more. What a login was granted
-- before is taken back by 2-grants.sql, just before the canary is replaced.
DO $$
DECLARE
    definition text := pg_get_functiondef('bind_canaries_to(regclass)'::regprocedure);
    granting   text := 'EXECUTE format(''GRANT SELECT ON %s TO penstock_canaries'', target);';
BEGIN
    IF position(granting IN definition) = 0 THEN
        RAISE EXCEPTION 'bind_canaries_to has no %', granting;
    END IF;
    EXECUTE replace(definition, granting, '');
END $$;

DO $$
DECLARE
    chunks regclass;
BEGIN
    FOR chunks IN SELECT DISTINCT to_regclass(quote_ident(chunk_table)) FROM generations LOOP
        IF chunks IS NOT NULL THEN
            PERFORM show_canaries_of(chunks);
        END IF;
    END LOOP;
    IF to_regrole('penstock_canaries') IS NOT NULL THEN
        GRANT USAGE ON SCHEMA canaries TO penstock_canaries;
        GRANT SELECT ON ALL TABLES IN SCHEMA canaries TO penstock_canaries;
        GRANT EXECUTE ON FUNCTION canaries.passages TO penstock_canaries;
    END IF;
END $$;
