-- Bulk requests to Elasticsearch that write entries and whose outcome nobody knows yet: recorded with the claim, before
-- the request is sent, and removed when every operation has been answered. What a worker leaves here when it dies, or
-- when no answer comes, may still arrive, even after Elasticsearch has forgotten that an entry was deleted. The keywords
-- workers compare it with the ledger again and again until it can no longer arrive (docs/adr/0039-open-bulks.md).
CREATE TABLE open_bulks (
    id            uuid        PRIMARY KEY,       -- digest of index and entries: the same request sent again is the same row
    keyword_index text        NOT NULL,
    documents     uuid[]      NOT NULL,          -- of each entry; no foreign key: a document that is removed leaves entries
    chunks        uuid[]      NOT NULL,          -- the entries' ids
    seqs          bigint[]    NOT NULL,          -- the versions that they are written with
    unanswered    integer     NOT NULL DEFAULT 1,-- how often it was sent without an answer
    sent_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    next_at       timestamptz NOT NULL,          -- when it is compared with the ledger again
    CHECK (cardinality(documents) = cardinality(chunks) AND cardinality(chunks) = cardinality(seqs))
);
CREATE INDEX open_bulks_due ON open_bulks (next_at);
