-- The audit's memory: how far a run came, and what it found.

CREATE TABLE audit_runs (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    generation  text        NOT NULL REFERENCES generations,
    scope       text        NOT NULL CHECK (scope IN ('all', 'since', 'background')),
    since       timestamptz,                -- scope 'since': what was accepted or settled after it
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    position    uuid,                       -- every document up to here was compared; NULL: none yet
    next_at     timestamptz NOT NULL DEFAULT clock_timestamp(), -- background: when its next page is due
    documents   bigint      NOT NULL DEFAULT 0,
    chunks      bigint      NOT NULL DEFAULT 0,
    pending     bigint      NOT NULL DEFAULT 0
);

-- The documents of a run with scope 'since', until it is finished.
CREATE TABLE audit_documents (
    run_id      bigint NOT NULL REFERENCES audit_runs ON DELETE CASCADE,
    document_id uuid   NOT NULL,
    PRIMARY KEY (run_id, document_id)
);

CREATE TABLE audit_differences (
    run_id      bigint  NOT NULL REFERENCES audit_runs ON DELETE CASCADE,
    document_id uuid    NOT NULL,           -- need not be one that the ledger knows
    store       text    NOT NULL,
    kind        text    NOT NULL,
    chunks      integer NOT NULL,
    external_id text,
    repaired    boolean NOT NULL DEFAULT false,
    PRIMARY KEY (run_id, document_id, store, kind)
);

-- `--since`: what settled lately. Takes no HOT update away: whatever sets settled_at sets seq too, and seq is in the
-- predicate of index_state_pending.
CREATE INDEX index_state_settled ON index_state (settled_at);
