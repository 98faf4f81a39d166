-- What members asked and were answered. Nothing here is a document: it is read by its member alone, and never searched
-- through a graph (a member has some dozens of chunks; an exact scan of them takes a millisecond).

CREATE TABLE conversation_members (
    tenant     text    NOT NULL,
    member     text    NOT NULL,
    tokens     bigint  NOT NULL DEFAULT 0,      -- of all pairs
    is_chunked boolean NOT NULL DEFAULT false,  -- one way: a history that has crossed the gate is never served whole again
    chunked_at timestamptz,                     -- when it crossed
    PRIMARY KEY (tenant, member),
    CHECK (is_chunked = (chunked_at IS NOT NULL))
);
CREATE FUNCTION conversation_stays_chunked() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'is_chunked is one-way' USING ERRCODE = 'check_violation';
END $$;
CREATE TRIGGER conversation_stays_chunked BEFORE UPDATE ON conversation_members FOR EACH ROW
    WHEN (OLD.is_chunked AND NOT NEW.is_chunked) EXECUTE FUNCTION conversation_stays_chunked();

-- A question with its answer, once a member, however often it was said.
CREATE TABLE conversation_pairs (
    tenant   text        NOT NULL,
    member   text        NOT NULL,
    digest   bytea       NOT NULL,              -- SHA-256 of both texts
    asked_at timestamptz NOT NULL,              -- the earliest of its mentions
    tokens   integer     NOT NULL,
    question text        NOT NULL,
    answer   text        NOT NULL,
    PRIMARY KEY (tenant, member, digest)
);
CREATE INDEX conversation_pairs_time ON conversation_pairs (tenant, member, asked_at, digest) INCLUDE (tokens);

-- Where a pair was said: forgetting one conversation leaves what was said in another as well.
CREATE TABLE conversation_mentions (
    tenant       text        NOT NULL,
    member       text        NOT NULL,
    digest       bytea       NOT NULL,
    source       text        NOT NULL,
    conversation text        NOT NULL,
    asked_at     timestamptz NOT NULL,
    observed_at  timestamptz NOT NULL,          -- the newest message that said so
    sent_id      text,                          -- the sender's name for it
    PRIMARY KEY (tenant, member, digest, source, conversation, asked_at),
    FOREIGN KEY (tenant, member, digest) REFERENCES conversation_pairs ON DELETE CASCADE
);
CREATE INDEX conversation_mentions_said ON conversation_mentions (tenant, member, source, conversation);

-- What was forgotten, and until when: no replay brings it back. Names are kept as digests only. Rows are never removed.
CREATE TABLE conversation_floors (
    tenant       text        NOT NULL,
    subject      bytea       NOT NULL,          -- SHA-256 of the member, or of member, source and conversation
    forgotten_at timestamptz NOT NULL,          -- messages that were not observed after it are ignored
    PRIMARY KEY (tenant, subject)
);

-- Of members beyond the gate only.
CREATE TABLE conversation_chunks (
    tenant    text        NOT NULL,
    member    text        NOT NULL,
    digest    bytea       NOT NULL,             -- SHA-256 of its pairs' digests: equal exactly when the text is
    position  integer     NOT NULL,             -- from 0, in time order
    first_at  timestamptz NOT NULL,
    last_at   timestamptz NOT NULL,
    tokens    integer     NOT NULL,
    text      text        NOT NULL,
    embedding halfvec,                          -- of any dimension: the model's
    made_by   text        COLLATE "C",          -- the model that embedded it, or refused it for good; NULL: waits
    attempts  integer     NOT NULL DEFAULT 0,
    next_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, member, digest),
    CHECK (made_by IS NOT NULL OR embedding IS NULL)
);
CREATE INDEX conversation_chunks_position ON conversation_chunks (tenant, member, position);
CREATE INDEX conversation_chunks_waiting ON conversation_chunks (next_at) WHERE made_by IS NULL;
CREATE INDEX conversation_chunks_made_by ON conversation_chunks (made_by) WHERE made_by IS NOT NULL;
