-- Canaries (docs/adr/0029) are ours alone: other teams' views no longer show them, and nobody is told that there are tags
-- for their sources. The columns are those of 0013, and so are the rules.

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
  AND (v.seq >= v.want_seq AND k.seq >= k.want_seq OR cardinality(k.confirmed) > 0)
  AND NOT starts_with(d.source, 'canary.');

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
END $$;
SELECT point_readers_at(chunk_table, name) FROM generations WHERE state = 'active';

CREATE OR REPLACE FUNCTION readers.access_of(tenant text, principal text) RETURNS text[]
LANGUAGE sql STABLE STRICT SECURITY DEFINER SET search_path = public, pg_temp AS $$
    WITH RECURSIVE found (source) AS (
        (SELECT d.source FROM documents d WHERE d.tenant = access_of.tenant ORDER BY d.source LIMIT 1)
        UNION ALL
        SELECT (SELECT d.source FROM documents d WHERE d.tenant = access_of.tenant AND d.source > f.source
                ORDER BY d.source LIMIT 1)
        FROM found f WHERE f.source IS NOT NULL
    ), held (tag) AS (
        SELECT f.source || '/user:' || access_of.principal FROM found f WHERE NOT starts_with(f.source, 'canary.')
        UNION
        SELECT m.source || '/' || g.name FROM memberships m, unnest(m.groups) g (name)
        WHERE m.tenant = access_of.tenant AND m.principal = access_of.principal
    )
    SELECT coalesce(array_agg(tag ORDER BY tag), '{}') FROM held
$$;
