-- The documents that an answer was made from, so that it is read along in a later question only by who may still read
-- every one of them (query/conversations.py, docs/adr/0042-provenance-of-answers.md). No text, and not who asked.

-- As the query service answered: of every passage that the model was shown, and of the answers that it read along.
CREATE TABLE answer_provenance (
    tenant    text        NOT NULL,
    answer_id uuid        NOT NULL,
    documents uuid[]      NOT NULL,
    made_at   timestamptz NOT NULL DEFAULT now(),  -- rows go after 30 days
    PRIMARY KEY (tenant, answer_id)
);
CREATE INDEX answer_provenance_age ON answer_provenance (made_at);

-- The same, of the answers that conversations name, for as long as they do.
CREATE TABLE conversation_provenance (
    tenant    text   NOT NULL,
    answer_id uuid   NOT NULL,
    documents uuid[] NOT NULL,
    PRIMARY KEY (tenant, answer_id)
);

-- Which answer the sender says that it is. Older rows have none.
ALTER TABLE conversation_mentions ADD COLUMN answer_id uuid;
CREATE INDEX conversation_mentions_answer ON conversation_mentions (tenant, answer_id) WHERE answer_id IS NOT NULL;
