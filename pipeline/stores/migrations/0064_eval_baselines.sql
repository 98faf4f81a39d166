-- What the running service is compared with, question by question, and where a golden question came from.

-- By measure: the accepted value, and a digest of what it was judged by (query/evaluation/baseline.py); NULL: none yet.
ALTER TABLE eval_queries ADD COLUMN baseline jsonb;
-- A question that was promoted from reviewed answers or feedback is erased with any of them; NULL: it was not.
ALTER TABLE eval_queries
    ADD COLUMN answers   uuid[],
    ADD COLUMN givers    bytea[],  -- digests of who gave the feedback
    ADD COLUMN documents uuid[];   -- of every passage that the answers were made from
ALTER TABLE eval_queries ADD CONSTRAINT plausible_origin CHECK (
    is_plain(coalesce(answers, '{}')) AND is_plain(coalesce(givers, '{}')) AND is_plain(coalesce(documents, '{}'))
) NOT VALID;

-- Compared with the accepted values: the relative change over the questions that have one, its p, how many they are, and
-- the mean of all accepted values. NULL: a run of an earlier version.
ALTER TABLE eval_runs
    ADD COLUMN change   double precision,
    ADD COLUMN p        double precision,
    ADD COLUMN paired   integer,
    ADD COLUMN accepted double precision;
ALTER TABLE eval_runs ADD CONSTRAINT plausible_change CHECK (
    coalesce(change, 0) BETWEEN -1e9 AND 1e9 AND coalesce(p, 0) BETWEEN 0 AND 1 AND coalesce(paired, 0) >= 0
    AND coalesce(accepted, 0) BETWEEN -1e9 AND 1e9
) NOT VALID;

-- Other services search the graph as ours does: with the same parameters, and exactly up to the same number of rows
-- (query/retrieval/vectors.py).
ALTER FUNCTION readers.nearest(halfvec, text, text[], integer) SET hnsw.ef_search = 300;
DO $$
DECLARE
    definition text := pg_get_functiondef('readers.nearest(halfvec, text, text[], integer)'::regprocedure);
BEGIN
    EXECUTE replace(definition, 'sqrt(6.0 * wanted', 'sqrt(8.0 * wanted');
END $$;
