-- Upserts that lost by version although they were observed later than what won. A delete that was observed in between,
-- and arrives last, makes them right after all: the document was created anew. Rare, and small: pruned with every change.
CREATE TABLE superseded (
    document_id        uuid        NOT NULL REFERENCES documents,
    version            bigint      NOT NULL,
    observed_at        timestamptz NOT NULL,
    content_hash       bytea       NOT NULL,
    meta_hash          bytea       NOT NULL,
    title              text,
    source_url         text,
    author             text,
    media_type         text,
    source_modified_at timestamptz,
    metadata           jsonb       NOT NULL,
    text               text        NOT NULL,
    PRIMARY KEY (document_id, observed_at, version)
);
