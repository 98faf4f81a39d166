-- Answers that somebody should look at, and what people thought of answers and passages. Ids and scores may be seen by
-- any operator of the tenant; the texts only by one who may read every document that the answer was made from, now
-- (query/review.py, docs/adr/0020-review-queue.md). Rows go after 30 days.

CREATE TABLE answer_reviews (
    answer_id   uuid        PRIMARY KEY,
    tenant      text        NOT NULL,
    asked_at    timestamptz NOT NULL DEFAULT now(),
    question    text        NOT NULL,
    mode        text        NOT NULL,
    model       text        NOT NULL,
    support     real        NOT NULL,           -- share of the claims that are supported
    density     real        NOT NULL,           -- share of the claims that carry a citation
    reasons     text[]      NOT NULL,
    documents   uuid[]      NOT NULL,           -- of every passage that the model was shown
    chunks      uuid[]      NOT NULL,           -- the passages, by their numbers from 1
    answer      text,                           -- NULL: a member's own history was read along, so it is nobody's to see
    unsupported text[],
    resolved_at timestamptz,
    resolved_as text        CHECK (resolved_as IN ('right', 'wrong')),
    CHECK ((answer IS NULL) = (unsupported IS NULL)),
    CHECK ((resolved_at IS NULL) = (resolved_as IS NULL))
);
CREATE INDEX answer_reviews_open ON answer_reviews (tenant, asked_at DESC, answer_id) WHERE resolved_at IS NULL;
CREATE INDEX answer_reviews_age ON answer_reviews (asked_at);

CREATE TABLE answer_feedback (
    tenant    text        NOT NULL,
    giver     bytea       NOT NULL,             -- SHA-256 of who gave it: one voice each, and no name
    subject   bytea       NOT NULL,             -- SHA-256 of what it is about
    answer_id uuid,
    chunk_id  uuid,
    query     text,
    verdict   text        NOT NULL CHECK (verdict IN ('up', 'down')),
    note      text,
    given_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, giver, subject),
    CHECK (answer_id IS NOT NULL OR chunk_id IS NOT NULL)
);
CREATE INDEX answer_feedback_answer ON answer_feedback (answer_id) WHERE answer_id IS NOT NULL;
CREATE INDEX answer_feedback_age ON answer_feedback (given_at);
CREATE INDEX answer_feedback_recent ON answer_feedback (tenant, given_at DESC);
