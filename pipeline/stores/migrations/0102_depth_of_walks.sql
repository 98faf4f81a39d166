-- Other services search the graph as ours does: with a candidate list that grows with the table (query/retrieval/vectors.py,
-- docs/adr/0117). The function's own setting ends with it.
DO $$
DECLARE
    before text := pg_get_functiondef('readers.nearest(halfvec, text, text[], integer)'::regprocedure);
    after  text := replace(before, '    EXECUTE format(
        ''SELECT count(*) > $3 FROM', $new$    PERFORM set_config('hnsw.ef_search',
        least(1000, 300 * greatest(1, sqrt(greatest(c.reltuples, 0) / 100000)))::integer::text, true)
    FROM pg_class c WHERE c.oid = to_regclass(format('%I', active.chunk_table));
    EXECUTE format(
        'SELECT count(*) > $3 FROM$new$);
BEGIN
    IF after = before THEN
        RAISE EXCEPTION 'readers.nearest has another definition than expected';
    END IF;
    EXECUTE after;
END $$;
