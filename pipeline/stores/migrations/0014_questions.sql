-- What questions are narrowed by, and what tells that an answer may have changed.

-- A filter that leaves little is counted and read by these; sources have documents_source, media types are few.
CREATE INDEX documents_author ON documents (tenant, author) WHERE author IS NOT NULL;
CREATE INDEX documents_modified ON documents (tenant, source_modified_at) WHERE source_modified_at IS NOT NULL;

-- Which transaction made a store follow: a remembered answer stands as long as none did that its asker's snapshot could
-- not see. A sequence would be drawn before the commit, and a time is; both would miss what commits late.
ALTER TABLE index_state ADD COLUMN settled_xid xid8;
CREATE INDEX index_state_settled_xid ON index_state (settled_xid);
CREATE FUNCTION index_state_settles() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.settled_xid := pg_current_xact_id();
    RETURN NEW;
END $$;
CREATE TRIGGER index_state_settles BEFORE INSERT OR UPDATE OF settled_at ON index_state FOR EACH ROW
    WHEN (NEW.settled_at IS NOT NULL) EXECUTE FUNCTION index_state_settles();
