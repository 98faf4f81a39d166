-- A golden question that was promoted from answers or feedback quotes what it was made from: it is erased by age as the fields
-- of a document are that its source has deleted (docs/retention.md).
DO $$
DECLARE
    definition text := pg_get_functiondef('erase_by_age(text, double precision, integer)'::regprocedure);
BEGIN
    EXECUTE replace(definition, 'END CASE;', $case$
        WHEN 'eval_judgements' THEN RETURN QUERY
            DELETE FROM eval_queries WHERE id IN (
                SELECT q.id FROM eval_queries q WHERE q.documents IS NOT NULL AND EXISTS (
                    SELECT FROM documents d WHERE d.id = ANY (q.documents) AND d.deleted_at < before
                ) LIMIT most
            ) RETURNING 1;
    END CASE;$case$);
END $$;
