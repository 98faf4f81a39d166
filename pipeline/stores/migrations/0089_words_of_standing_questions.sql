-- What a new passage must contain to enter the context of a standing question by keyword search (query/standing/words.py), and
-- whether it would have to take another one's place. Numbers stand for words: they differ between tenants.
ALTER TABLE standing_questions
    ADD COLUMN is_full     boolean  NOT NULL DEFAULT true,
    ADD COLUMN words       bigint[],                  -- NULL: of an older version, until the question is embedded again
    ADD COLUMN names       bigint[] NOT NULL DEFAULT '{}',
    ADD COLUMN anchors     bigint[] NOT NULL DEFAULT '{}',
    ADD COLUMN words_floor integer  NOT NULL DEFAULT 0;
CREATE INDEX standing_questions_anchors ON standing_questions USING gin (anchors);
