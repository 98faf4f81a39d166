-- What invalidates standing questions, as the analysis worker noticed it (docs/standing.md), and announced. It writes this table
-- and no other. A row counts for the answer that was given at asked_at: a newer answer leaves it behind.
CREATE TABLE standing_changes (
    tenant      text        NOT NULL,
    question_id uuid        NOT NULL,
    kind        text        NOT NULL CHECK (octet_length(kind) <= 20),
    chunk_id    uuid        NOT NULL,
    document_id uuid        NOT NULL,
    asked_at    timestamptz NOT NULL,
    noticed_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, question_id, kind, chunk_id),
    FOREIGN KEY (tenant, question_id) REFERENCES standing_questions (tenant, id) ON DELETE CASCADE
);

-- Receivers of webhooks that also want the news of standing questions: others would not know the type.
ALTER TABLE webhooks ADD COLUMN answers boolean NOT NULL DEFAULT false;
