-- What a standing question was answered from a document goes with the fields of the document's row, when these are erased by age
-- (docs/retention.md). It has no other effect, whoever calls it: an answer from a deleted document is shown to nobody.
CREATE FUNCTION erase_standing_answers(ids uuid[]) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    WITH erased AS (
        UPDATE standing_questions q SET sentences = '[]' WHERE q.sentences <> '[]' AND (q.tenant, q.id) IN (
            SELECT p.tenant, p.question_id FROM standing_passages p
            JOIN documents d ON d.id = p.document_id AND d.tenant = p.tenant
            WHERE p.document_id = ANY (ids) AND d.deleted_at IS NOT NULL
        ) RETURNING 1
    ) SELECT count(*) FROM erased
$$;
REVOKE EXECUTE ON FUNCTION erase_standing_answers FROM PUBLIC;
