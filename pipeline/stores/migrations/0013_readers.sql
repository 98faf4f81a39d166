-- What other teams' query services rely on: docs/readers.md, and docs/adr/0021 for why it looks like this. Columns are
-- only ever added at the end. LEFT JOINs on primary keys cost nothing where their columns are not asked for.

-- The generation in force: what to embed a query with, and the index to ask.
CREATE OR REPLACE VIEW readers.generation AS
SELECT name, model, revision, dimensions, query_prefix, document_prefix, input_window, keyword_index, vector_type
FROM generations WHERE state = 'active';

-- Documents that somebody may read and that both stores return (or return as they were before a change that is on its
-- way: pending).
CREATE OR REPLACE VIEW readers.documents AS
SELECT d.id, d.tenant, d.source, d.external_id, d.title, d.source_url, d.author, d.media_type, d.source_modified_at,
       d.version, d.seq, a.acl_tags, a.required_tags,
       b.metadata, coalesce(cardinality(m.chunk_ids), 0) AS chunks,
       v.seq < v.want_seq OR k.seq < k.want_seq AS pending, cardinality(v.refused) > 0 AS partial,
       greatest(v.settled_at, k.settled_at) AS indexed_at
FROM documents d
JOIN access_sets a ON a.id = d.access_id
JOIN generations g ON g.state = 'active'
JOIN index_state v ON v.document_id = d.id AND v.generation = g.name AND v.store = 'vectors'
JOIN index_state k ON k.document_id = d.id AND k.generation = g.name AND k.store = 'keywords'
LEFT JOIN manifests m ON m.document_id = d.id AND m.generation = g.name
LEFT JOIN document_bodies b ON b.document_id = d.id
WHERE d.deleted_at IS NULL AND d.version IS NOT NULL AND cardinality(a.acl_tags) > 0
  AND (v.seq >= v.want_seq AND k.seq >= k.want_seq OR cardinality(k.confirmed) > 0);

-- Makes readers.chunks show a generation: at the first one's creation and at every cut-over, in that transaction.
-- Embeddings are shown as halfvec without a fixed dimension, so that a model of another one can take its place.
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
    $view$, chunk_table, generation);
    GRANT SELECT ON readers.chunks TO penstock_reader;
END $$;
REVOKE EXECUTE ON FUNCTION point_readers_at FROM PUBLIC;
SELECT point_readers_at(chunk_table, name) FROM generations WHERE state = 'active';

-- The tags that a principal holds now, as documents carry them: user:PRINCIPAL in every source that the tenant has
-- documents of, and its groups. The same rule as query.access.identify.
CREATE OR REPLACE FUNCTION readers.access_of(tenant text, principal text) RETURNS text[]
LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH RECURSIVE found (source) AS (
        (SELECT d.source FROM documents d WHERE d.tenant = access_of.tenant ORDER BY d.source LIMIT 1)
        UNION ALL
        SELECT (SELECT d.source FROM documents d WHERE d.tenant = access_of.tenant AND d.source > f.source
                ORDER BY d.source LIMIT 1)
        FROM found f WHERE f.source IS NOT NULL
    ), held (tag) AS (
        SELECT f.source || '/user:' || access_of.principal FROM found f WHERE f.source IS NOT NULL
        UNION
        SELECT m.source || '/' || g.name FROM memberships m, unnest(m.groups) g (name)
        WHERE m.tenant = access_of.tenant AND m.principal = access_of.principal
    )
    SELECT coalesce(array_agg(tag ORDER BY tag), '{}') FROM held
$$;

SELECT '[1]'::halfvec;  -- loads pgvector: only then are its settings known, and anybody may set them

-- The chunks nearest to a query among those that whoever holds these tags may read now, nearest first: through the
-- graph where that is much, exactly where it is little (the changeover of query.vectors), then by the ledger. Why a
-- function: a view that joins the ledger is planned as a scan of everything, and one that does not would show what is
-- withheld.
CREATE OR REPLACE FUNCTION readers.nearest(query halfvec, tenant text, tags text[], top integer DEFAULT 50)
RETURNS TABLE (id uuid, doc_id uuid, distance double precision)
LANGUAGE plpgsql STABLE STRICT SECURITY DEFINER ROWS 50
SET search_path = public, pg_temp
SET hnsw.iterative_scan = 'relaxed_order' SET hnsw.ef_search = 200 SET hnsw.max_scan_tuples = 200000
SET hnsw.scan_mem_multiplier = 8 SET random_page_cost = 1 AS $$
DECLARE
    active    generations;
    wanted    integer := 2 * least(greatest(top, 1), 1000);  -- some may be withheld, and a walk's order is not exact
    readable  bigint[];
    most      bigint;
    walk      boolean;
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
    IF walk THEN
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

REVOKE EXECUTE ON FUNCTION readers.access_of, readers.nearest FROM PUBLIC;
GRANT EXECUTE ON FUNCTION readers.access_of, readers.nearest TO penstock_reader;
GRANT SELECT ON readers.generation, readers.documents TO penstock_reader;
