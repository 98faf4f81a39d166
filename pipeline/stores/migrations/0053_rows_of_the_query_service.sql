-- What the query service writes, operators and workers read (docs/security.md): a row of a query service that was taken over
-- must neither keep them from reading, exporting or erasing all others, nor escape erasure by age. Rows that exist are not
-- examined.
CREATE FUNCTION is_recent(moment timestamptz) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
    RETURN moment BETWEEN '2000-01-01Z' AND now() + interval '1 day';

CREATE FUNCTION is_plain(list anyarray) RETURNS boolean
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(array_ndims(list), 1) = 1 AND array_position(list, NULL) IS NULL AND cardinality(list) <= 100000
$$;

ALTER TABLE answer_provenance
    ADD CONSTRAINT plausible CHECK (is_recent(made_at) AND is_plain(documents)) NOT VALID;
ALTER TABLE answer_reviews
    ADD CONSTRAINT plausible CHECK (
        is_recent(asked_at) AND is_recent(coalesce(resolved_at, asked_at))
        AND support BETWEEN 0 AND 1 AND density BETWEEN 0 AND 1  -- NaN is greater than every number
        AND is_plain(reasons) AND is_plain(documents) AND is_plain(chunks)
        AND is_plain(coalesce(unsupported, '{}'))
    ) NOT VALID;
ALTER TABLE answer_feedback ADD CONSTRAINT plausible CHECK (is_recent(given_at)) NOT VALID;
ALTER TABLE eval_queries
    ADD CONSTRAINT plausible CHECK (is_recent(added_at) AND is_plain(principals) AND is_plain(tags)) NOT VALID;
ALTER TABLE eval_runs
    ADD CONSTRAINT plausible CHECK (is_recent(started_at) AND value BETWEEN -1e9 AND 1e9 AND queries >= 0) NOT VALID;
ALTER TABLE shadow_agreement
    ADD CONSTRAINT plausible CHECK (
        is_recent(hour) AND queries >= 0 AND failed >= 0 AND overlap BETWEEN 0 AND 1e15 AND agreement BETWEEN 0 AND 1e15
    ) NOT VALID;
