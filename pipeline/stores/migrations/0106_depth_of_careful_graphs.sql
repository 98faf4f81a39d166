-- The candidate list of a search through a graph that was built with care grows more slowly (query/retrieval/vectors.py,
-- docs/adr/0118).
DO $$
DECLARE
    before text := pg_get_functiondef('readers.nearest(halfvec, text, text[], integer)'::regprocedure);
    after  text := replace(before, 'sqrt(greatest(c.reltuples, 0) / 100000)',
        $new$power(greatest(c.reltuples, 0) / 100000, CASE WHEN (
            SELECT 'm=24' = ANY(g.reloptions) FROM pg_class g
            WHERE g.oid = to_regclass(format('%I', active.chunk_table || '_hnsw'))
        ) THEN 0.25 ELSE 0.5 END::float8)$new$);
BEGIN
    IF after = before THEN
        RAISE EXCEPTION 'readers.nearest has another definition than expected';
    END IF;
    EXECUTE after;
END $$;
