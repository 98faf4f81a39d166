-- Which Elasticsearch index, with which history, the ledger's entries were written into. An index that was deleted and
-- made anew, restored from a snapshot, or whose primary shard is a stale copy, is another one: it is not searched until
-- every document has been compared with it (docs/adr/0043-a-keyword-index-that-changed.md).
CREATE TABLE keyword_indexes (
    keyword_index text        PRIMARY KEY,
    index_uuid    text        NOT NULL,
    shards        jsonb       NOT NULL,           -- shard number → [history_uuid, highest global checkpoint seen]
    changes       integer     NOT NULL DEFAULT 0, -- counted up with each change that was noticed
    change        text        CHECK (change IN ('recreated', 'new_history', 'rewound')),
    changed_at    timestamptz,                    -- null: it is the one that the ledger filled, and is searched
    position      uuid,                           -- up to which document it was compared since then
    compared_at   timestamptz,                    -- when every document had been
    CHECK ((change IS NULL) = (changed_at IS NULL))
);
-- Written every half minute: in place, without index entries.
ALTER TABLE keyword_indexes SET (fillfactor = 50);
