-- Rows that wait outside of their generation's HNSW graph (docs/adr/0030). What older versions write is in it.

-- Every generation's chunk table gets the column; adding it with a constant default writes no row. `penstock migrate`
-- does it again each time: the version before may have been back, and have made a table of its own.
CREATE FUNCTION complete_chunk_tables() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    chunks regclass;
BEGIN
    FOR chunks IN SELECT DISTINCT to_regclass(quote_ident(chunk_table)) FROM generations LOOP
        IF chunks IS NOT NULL AND NOT EXISTS (
            SELECT FROM pg_attribute WHERE attrelid = chunks AND attname = 'in_graph' AND NOT attisdropped
        ) THEN
            EXECUTE format('ALTER TABLE %s ADD COLUMN in_graph boolean NOT NULL DEFAULT true', chunks);
        END IF;
    END LOOP;
END $$;
REVOKE EXECUTE ON FUNCTION complete_chunk_tables FROM PUBLIC;
SELECT complete_chunk_tables();

-- As in 0013, with the rows that wait outside read exactly beside the walk, in one statement; and where there is no graph
-- (a small table, a first load), everything is.
CREATE OR REPLACE FUNCTION readers.nearest(query halfvec, tenant text, tags text[], top integer DEFAULT 50)
RETURNS TABLE (id uuid, doc_id uuid, distance double precision)
LANGUAGE plpgsql STABLE STRICT SECURITY DEFINER ROWS 50
SET search_path = public, pg_temp
SET hnsw.iterative_scan = 'relaxed_order' SET hnsw.ef_search = 200 SET hnsw.max_scan_tuples = 200000
SET hnsw.scan_mem_multiplier = 8 SET random_page_cost = 1 SET enable_seqscan = on AS $$
DECLARE
    active    generations;
    wanted    integer := 2 * least(greatest(top, 1), 1000);  -- some may be withheld, and a walk's order is not exact
    readable  bigint[];
    most      bigint;
    walk      boolean;
    partial   boolean;  -- whether its graph is one of the rows that say so; NULL: it has none
    offered   uuid[];
    distances double precision[];
BEGIN
    SELECT g.* INTO STRICT active FROM generations g WHERE g.state = 'active';
    SELECT array_agg(DISTINCT a.id) INTO readable  -- OFFSET 0, NOT IN: as in query/access.py
    FROM unnest(tags) mine (tag) CROSS JOIN LATERAL (
        SELECT s.id, s.tenant, s.required_tags FROM access_sets s WHERE s.acl_tags @> ARRAY[mine.tag] OFFSET 0
    ) a
    WHERE a.tenant = nearest.tenant
      AND NOT EXISTS (SELECT FROM unnest(a.required_tags) needed WHERE needed NOT IN (SELECT unnest(tags)));
    SELECT greatest(5000, sqrt(6.0 * wanted * greatest(c.reltuples, 0))) INTO STRICT most
    FROM pg_class c WHERE c.oid = to_regclass(format('%I', active.chunk_table));
    EXECUTE format(
        'SELECT count(*) > $3 FROM (SELECT FROM documents d JOIN %I c ON c.document_id = d.id'
        ' WHERE d.tenant = $1 AND d.access_id = ANY ($2) LIMIT $3 + 1) counted', active.chunk_table
    ) INTO walk USING tenant, readable, most;
    SELECT bool_or(i.indpred IS NOT NULL) INTO partial
    FROM pg_index i JOIN pg_class g ON g.oid = i.indexrelid JOIN pg_am a ON a.oid = g.relam
    WHERE i.indrelid = to_regclass(format('%I', active.chunk_table)) AND a.amname = 'hnsw' AND i.indisvalid;
    walk := walk AND partial IS NOT NULL;
    IF walk AND partial THEN
        PERFORM set_config('enable_seqscan', 'off', true);  -- the few outside are found by their index
        EXECUTE format(
            'WITH inside AS MATERIALIZED (SELECT c.id, c.embedding <=> $1::%s AS distance FROM %I c'
            ' WHERE c.in_graph AND c.access_id = ANY ($2) ORDER BY c.embedding <=> $1::%1$s LIMIT $3),'
            ' outside AS MATERIALIZED (SELECT * FROM (SELECT c.id, c.embedding <=> $1::%1$s AS distance FROM %2$I c'
            ' WHERE NOT c.in_graph AND c.access_id = ANY ($2) OFFSET 0) waiting ORDER BY distance LIMIT $3)'
            ' SELECT array_agg(n.id), array_agg(n.distance) FROM (SELECT * FROM (TABLE inside UNION ALL TABLE outside)'
            ' both_ ORDER BY distance LIMIT $3) n',
            active.vector_type, active.chunk_table
        ) INTO offered, distances USING query, readable, wanted;
        PERFORM set_config('enable_seqscan', 'on', true);
    ELSIF walk THEN
        EXECUTE format(
            'SELECT array_agg(n.id), array_agg(n.distance) FROM (SELECT c.id, c.embedding <=> $1::%s AS distance'
            ' FROM %I c WHERE c.access_id = ANY ($2) ORDER BY c.embedding <=> $1::%1$s LIMIT $3) n',
            active.vector_type, active.chunk_table
        ) INTO offered, distances USING query, readable, wanted;
    END IF;
    IF NOT walk OR coalesce(cardinality(offered), 0) < wanted THEN
        EXECUTE format(
            'SELECT array_agg(n.id), array_agg(n.distance) FROM (SELECT c.id, c.embedding <=> $1::%s AS distance'
            ' FROM documents d JOIN %I c ON c.document_id = d.id WHERE d.tenant = $4 AND d.access_id = ANY ($2)'
            ' AND d.deleted_at IS NULL ORDER BY (c.embedding <=> $1::%1$s) + 0, c.id LIMIT $3) n',
            active.vector_type, active.chunk_table
        ) INTO offered, distances USING query, readable, wanted, tenant;
    END IF;
    RETURN QUERY
        WITH found AS MATERIALIZED (  -- by key first: how many sets hold a tag is guessed far too low
            SELECT c.id, c.doc_id, c.tenant, c.acl_tags, c.required_tags FROM readers.chunks c WHERE c.id = ANY (offered)
        )
        SELECT f.id, f.doc_id, n.distance FROM unnest(offered, distances) n (id, distance) JOIN found f ON f.id = n.id
        WHERE f.tenant = nearest.tenant AND f.acl_tags && tags AND f.required_tags <@ tags
        ORDER BY n.distance, f.id LIMIT wanted / 2;
END $$;
