-- Dead letters that people can work with: where the letter stands, how often it failed, and what became of it.

ALTER TABLE dead_letters
    ADD COLUMN letter_partition   integer,      -- on dead-letters.v1; NULL: buried before this was remembered
    ADD COLUMN letter_offset      bigint,
    ADD COLUMN value_bytes        bigint,       -- NULL: the record has no value (or: see above)
    ADD COLUMN attempt            integer NOT NULL DEFAULT 1,
    ADD COLUMN first_failed_at    timestamptz,
    ADD COLUMN replay_of          text,         -- the letter whose replay this is
    ADD COLUMN replayed_at        timestamptz,  -- NULL: waits for somebody
    ADD COLUMN replayed_partition integer,      -- where the replayed record stands on the letter's topic …
    ADD COLUMN replayed_offset    bigint;       -- … NULL: nothing was sent, because something newer was known
UPDATE dead_letters SET first_failed_at = at;
ALTER TABLE dead_letters ALTER COLUMN first_failed_at SET NOT NULL;

CREATE INDEX dead_letters_newest ON dead_letters (at, id);
CREATE INDEX dead_letters_waiting ON dead_letters (at, id) WHERE replayed_at IS NULL;
