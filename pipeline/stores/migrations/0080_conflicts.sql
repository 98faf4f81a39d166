-- Passages that contradict or repeat each other (docs/adr/0088-contradictions.md). No text is here: a passage is named by
-- its chunk, whose id is a digest of its text, and a place by its characters in that chunk.

CREATE TABLE conflicts (
    id          uuid        PRIMARY KEY,                  -- uuid5 of both chunks and the generation
    tenant      text        NOT NULL,
    generation  text        NOT NULL,
    kind        text        NOT NULL CHECK (
        kind IN ('number', 'date', 'version', 'unit', 'name', 'negation', 'duplicate', 'outdated')),
    document_a  uuid        NOT NULL REFERENCES documents ON DELETE CASCADE,
    document_b  uuid        NOT NULL REFERENCES documents ON DELETE CASCADE,
    chunk_a     uuid        NOT NULL,
    chunk_b     uuid        NOT NULL,
    older       text        CHECK (older IN ('a', 'b')),
    places      jsonb       NOT NULL,                     -- [[kind, [start, end] in a, [start, end] in b], …]
    at          timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX conflicts_document_a ON conflicts (document_a);
CREATE INDEX conflicts_document_b ON conflicts (document_b);
CREATE INDEX conflicts_newest ON conflicts (tenant, at DESC, id);

-- What a person decided of a conflict. It ends with the conflict.
CREATE TABLE conflict_decisions (
    conflict_id uuid        PRIMARY KEY REFERENCES conflicts ON DELETE CASCADE,
    tenant      text        NOT NULL,
    state       text        NOT NULL CHECK (state IN ('dismissed', 'accepted')),
    at          timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The chunks of a document that were compared with their neighbours: after an edit only the others are.
CREATE TABLE conflict_examined (
    document_id uuid        PRIMARY KEY REFERENCES documents ON DELETE CASCADE,
    tenant      text        NOT NULL,
    generation  text        NOT NULL,
    chunk_ids   uuid[]      NOT NULL
);
