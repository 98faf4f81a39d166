-- How far the generation that may take over agrees with the active one on real questions. Sums of an hour, never a
-- question, an asker or a document.
CREATE TABLE shadow_agreement (
    active    text             NOT NULL,
    candidate text             NOT NULL,
    hour      timestamptz      NOT NULL,  -- begins
    queries   bigint           NOT NULL,
    overlap   double precision NOT NULL,  -- sum over the queries: share of the first ten documents that both have
    agreement double precision NOT NULL,  -- sum over the queries: rank-biased overlap
    failed    bigint           NOT NULL,  -- questions that either of them could not answer whole; not among queries
    PRIMARY KEY (active, candidate, hour)
);
