-- The access set with which a document's chunks were last compared with their neighbours: with another one they are
-- compared again, because the document has a reader in common with others than before.
ALTER TABLE conflict_examined ADD COLUMN access_id bigint;
