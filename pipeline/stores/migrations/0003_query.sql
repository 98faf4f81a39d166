-- What queries ask for besides ids.

-- "Which access sets may this caller read": one probe for each tag that the caller holds. No pending list: readers
-- would have to scan it.
CREATE INDEX access_sets_acl ON access_sets USING gin (acl_tags) WITH (fastupdate = off);

-- The sources of a tenant, one index probe each; never updated, so that document updates stay HOT.
CREATE INDEX documents_source ON documents (tenant, source);
