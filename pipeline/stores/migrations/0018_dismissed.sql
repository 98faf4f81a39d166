-- Letters that somebody judged not worth replaying: they are kept, wait for nobody, and are counted no more. Who did it
-- and why stands in a trail of its own, which outlives an undo.

ALTER TABLE dead_letters
    ADD COLUMN dismissed_at     timestamptz,  -- NULL: not dismissed, or that was undone
    ADD COLUMN dismissed_by     text,
    ADD COLUMN dismissed_reason text;

CREATE TABLE dead_letter_trail (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    letter_id text NOT NULL REFERENCES dead_letters,
    at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    action    text NOT NULL CHECK (action IN ('dismissed', 'undone')),
    by        text NOT NULL,                  -- as the command was told, or the user that ran it
    reason    text                            -- NULL: none was given for an undo
);
CREATE INDEX dead_letter_trail_letter ON dead_letter_trail (letter_id, id);

-- What embedding cost, a row for each day (UTC) and purpose (documents, conversations); the vectors workers add to it.
-- `penstock status` shows today.
CREATE TABLE embedding_days (
    day      date   NOT NULL,
    purpose  text   NOT NULL,
    tokens   bigint NOT NULL,
    cost     double precision NOT NULL,       -- in the currency of PENSTOCK_EMBEDDING_PRICE_PER_MILLION_TOKENS
    PRIMARY KEY (day, purpose)
);
