-- The login of `penstock forget` updates columns of documents and groups to erase what they hold. It could also write into
-- them: another access set, which opens a document to everybody, another title, address or text, or a member of a group.
-- Who may add no rows only erases. The functions look at what a row held; the conditions are for workers, and short because
-- Postgres prepares them anew for each statement, of which workers send one for each document.
CREATE FUNCTION only_erases_documents() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF (NEW.external_id = OLD.external_id OR NEW.external_id = 'erased:' || NEW.id)
        AND (NEW.title IS NULL OR NEW.title IS NOT DISTINCT FROM OLD.title)
        AND (NEW.source_url IS NULL OR NEW.source_url IS NOT DISTINCT FROM OLD.source_url)
        AND (NEW.author IS NULL OR NEW.author IS NOT DISTINCT FROM OLD.author)
        AND (NEW.source_modified_at IS NULL OR NEW.source_modified_at IS NOT DISTINCT FROM OLD.source_modified_at)
        AND NEW.keys <@ OLD.keys
        AND (NEW.access_id IS NULL OR NEW.access_id IS NOT DISTINCT FROM OLD.access_id)
    THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'this login may erase what is in a row of documents, and write nothing into it'
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE FUNCTION only_erases_bodies() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF (NEW.text = '' OR NEW.text = OLD.text) AND OLD.metadata @> NEW.metadata THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'this login may erase what is in a row of document_bodies, and write nothing into it'
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE FUNCTION only_erases_groups() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF (NEW.tenant, NEW.source, NEW.tag, NEW.observed_at) = (OLD.tenant, OLD.source, OLD.tag, OLD.observed_at)
        AND NEW.members <@ OLD.members AND NEW.of <@ OLD.of
    THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'this login may erase what is in a row of connector_groups, and write nothing into it'
        USING ERRCODE = 'insufficient_privilege';
END $$;

-- After the update: before it, each row would be locked in addition. For workers no event is queued.
CREATE TRIGGER only_erases
AFTER UPDATE OF external_id, title, source_url, author, source_modified_at, keys, access_id ON documents FOR EACH ROW
WHEN (NOT has_table_privilege('documents'::regclass, 'INSERT')) EXECUTE FUNCTION only_erases_documents();

CREATE TRIGGER only_erases AFTER UPDATE OF text, metadata ON document_bodies FOR EACH ROW
WHEN (NOT has_table_privilege('document_bodies'::regclass, 'INSERT')) EXECUTE FUNCTION only_erases_bodies();

CREATE TRIGGER only_erases AFTER UPDATE ON connector_groups FOR EACH ROW
WHEN (NOT has_table_privilege('connector_groups'::regclass, 'INSERT')) EXECUTE FUNCTION only_erases_groups();
