-- Who may store the mark of a partition: grows with every assignment, so that a worker that has lost the partition cannot
-- overwrite the mark of the one that has it now (docs/adr/0036-kafka-log-moved.md). A row with an empty log_id is no mark.
ALTER TABLE kafka_marks ADD COLUMN owner bigint NOT NULL DEFAULT 0;

-- What the comparison of a connector with the ledger remembers from one time to the next, whatever process makes it
-- (docs/adr/0035-reconciliation.md).
CREATE TABLE connector_differences (
    tenant      text        NOT NULL,
    source      text        NOT NULL,
    subject     text        NOT NULL CHECK (subject IN ('document', 'principal')),
    name        text        COLLATE "C" NOT NULL,
    published   bytea       NOT NULL,  -- digest of what was published: while it is the same, nothing more was sent
    seen_at     timestamptz NOT NULL,  -- when it was first seen to differ while that was published
    repaired_at timestamptz,           -- when it was last marked to be published again
    PRIMARY KEY (tenant, source, subject, name)
);

-- When the newest dead letter of each document came that waits since a week at most: one that is younger than a delete
-- may be the delete itself.
CREATE FUNCTION ledger_letters(ids uuid[]) RETURNS TABLE (id uuid, at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT l.document_id, max(l.at) FROM dead_letters l
    WHERE l.document_id = ANY(ids) AND l.replayed_at IS NULL AND l.stage = 'detect'
        AND l.at > now() - interval '7 days'
    GROUP BY l.document_id
$$;
REVOKE EXECUTE ON FUNCTION ledger_letters FROM PUBLIC;
