-- A principal is in doubt while it is not known whether Kafka has its latest set of tags: its row has the empty digest.
-- The row is written before the set is published, and gets the set's digest after Kafka has acknowledged it. Whatever is
-- in doubt is published again by any later look. An empty digest already meant "publish again" to the version before.
CREATE INDEX connector_principals_in_doubt ON connector_principals (tenant, source, principal) WHERE digest = '';

-- Which tags does this principal hold, and which tags contain this one? Without these a webhook that names one group
-- costs reading all groups. No pending list: its size would be added to every lookup.
CREATE INDEX connector_groups_members ON connector_groups USING gin (members) WITH (fastupdate = off);
CREATE INDEX connector_groups_of ON connector_groups USING gin (of) WITH (fastupdate = off);

-- A new stamp alone shall not write index entries: room for the new row beside the old one.
ALTER TABLE connector_groups SET (fillfactor = 80);
