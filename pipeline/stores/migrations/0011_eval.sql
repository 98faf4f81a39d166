-- Questions with judged answers, anchored to documents and to what stands in them, and how the running service did on
-- them. Nothing here names a chunk: an edit, a re-chunking or another model leaves every judgement standing.

CREATE TABLE eval_queries (
    id         uuid        PRIMARY KEY,                    -- uuid5 of tenant and text
    tenant     text        NOT NULL,
    text       text        NOT NULL,
    principals text[]      NOT NULL,                       -- who asks: judged is what they may read at that moment
    tags       text[]      NOT NULL,
    reference  text,                                       -- what a right answer says; NULL: nobody wrote one
    added_at   timestamptz NOT NULL DEFAULT now(),
    UNIQUE (tenant, text)
);

CREATE TABLE eval_judgements (
    query_id    uuid     NOT NULL REFERENCES eval_queries ON DELETE CASCADE,
    source      text     NOT NULL,
    external_id text     COLLATE "C" NOT NULL,
    anchor      text     NOT NULL DEFAULT '',              -- words that stand in the passage; '': any of the document
    gain        smallint NOT NULL CHECK (gain BETWEEN 1 AND 10),
    PRIMARY KEY (query_id, source, external_id, anchor)
);

CREATE TABLE eval_runs (
    id         bigint           GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    started_at timestamptz      NOT NULL,                  -- the same for all rows of one run
    generation text             NOT NULL,
    slice      text             NOT NULL,                  -- a source; '*': all of them
    measure    text             NOT NULL,
    value      double precision NOT NULL,
    queries    integer          NOT NULL                   -- that it is the mean of
);
CREATE INDEX eval_runs_newest ON eval_runs (started_at DESC);
