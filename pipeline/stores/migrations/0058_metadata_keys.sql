-- Metadata that searches filter by (docs/adr/0073-metadata-filters.md). Only declared keys are indexed.
CREATE TABLE metadata_keys (
    tenant      text        NOT NULL,
    name        text        NOT NULL,
    type        text        NOT NULL CHECK (type IN ('keyword', 'number', 'date', 'boolean')),
    declared_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, name)
);

-- The terms (pipeline.core.metadata_keys) of a document's declared keys. "C": ordered as in Elasticsearch, by code point.
-- Nothing is declared yet, so no document has any.
ALTER TABLE documents ADD COLUMN keys text[] COLLATE "C" NOT NULL DEFAULT '{}';
CREATE INDEX documents_by_key ON documents USING gin (keys) WHERE keys <> '{}';

-- As in 0019, with the terms at the end.
CREATE OR REPLACE VIEW readers.documents AS
SELECT d.id, d.tenant, d.source, d.external_id, d.title, d.source_url, d.author, d.media_type, d.source_modified_at,
       d.version, d.seq, a.acl_tags, a.required_tags,
       b.metadata, coalesce(cardinality(m.chunk_ids), 0) AS chunks,
       v.seq < v.want_seq OR k.seq < k.want_seq AS pending, cardinality(v.refused) > 0 AS partial,
       greatest(v.settled_at, k.settled_at) AS indexed_at, d.keys
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
CREATE OR REPLACE VIEW tenant_readers.documents WITH (security_barrier) AS
SELECT * FROM readers.documents WHERE tenant = (SELECT tenant_readers.tenant());
