-- A listing of all groups of a source, which is published part by part: its stamp, the cursor at which it continues, and
-- when its last part was written. NULL: none is under way.
ALTER TABLE connectors ADD COLUMN groups_listing jsonb;
