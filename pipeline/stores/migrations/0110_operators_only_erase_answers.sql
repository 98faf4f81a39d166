-- As 0108, for the other rows in which the login of `penstock forget` may update what people read: it could put another sentence
-- under the citations of a stored answer, and another author or value of metadata into an earlier version of a document.
CREATE FUNCTION only_erases_answers() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF NEW.sentences = '[]' OR NEW.sentences = OLD.sentences THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'this login may erase what is in a row of standing_questions, and write nothing into it'
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE FUNCTION only_erases_superseded() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    IF (NEW.author IS NULL OR NEW.author IS NOT DISTINCT FROM OLD.author) AND OLD.metadata @> NEW.metadata THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'this login may erase what is in a row of superseded, and write nothing into it'
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE TRIGGER only_erases AFTER UPDATE OF sentences ON standing_questions FOR EACH ROW
WHEN (NOT has_table_privilege('standing_questions'::regclass, 'INSERT')) EXECUTE FUNCTION only_erases_answers();

CREATE TRIGGER only_erases AFTER UPDATE OF author, metadata ON superseded FOR EACH ROW
WHEN (NOT has_table_privilege('superseded'::regclass, 'INSERT')) EXECUTE FUNCTION only_erases_superseded();
