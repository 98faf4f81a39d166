-- The words of standing questions are counted in memory (query/standing/word_index.py): a frequent word is an anchor of too many.
ALTER TABLE standing_questions DROP COLUMN anchors;
