-- Withdrawal without the source, retention and erasure (docs/adr/0048-erasure.md).

ALTER TABLE connectors
    ADD COLUMN removed_at           timestamptz,      -- no runner takes it up until it is resumed; NULL: not removed
    ADD COLUMN access_every_seconds double precision; -- between two whole readings of access rights, as declared

-- A document that an operator withdrew: for its connector the source no longer has it, whatever the source answers.
ALTER TABLE connector_items ADD COLUMN withdrawn_at timestamptz;
CREATE INDEX connector_items_withdrawn ON connector_items (tenant, source) WHERE withdrawn_at IS NOT NULL;
CREATE INDEX connector_items_gone ON connector_items (content_at) WHERE gone AND withdrawn_at IS NULL;

-- When title, author, address and external id of a deleted document were erased. The row stays: the delete's floor is in
-- it. An upsert that is accepted later writes them anew.
ALTER TABLE documents ADD COLUMN erased_at timestamptz;
CREATE INDEX documents_to_erase ON documents (deleted_at) WHERE deleted_at IS NOT NULL AND erased_at IS NULL;

-- What else goes by age, found without reading the rest.
CREATE INDEX superseded_age ON superseded (observed_at);
CREATE INDEX memberships_lost ON memberships (observed_at) WHERE groups = '{}';
CREATE INDEX eval_queries_age ON eval_queries (added_at);
CREATE INDEX connector_asks_age ON connector_asks (done_at) WHERE done_at IS NOT NULL;

-- What other roles write goes by age with their owner's rights: the worker that sees to it neither reads nor writes it.
CREATE FUNCTION erase_by_age(kind text, days double precision, most integer) RETURNS SETOF integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    before timestamptz := clock_timestamp() - make_interval(secs => greatest(days, 1) * 86400);  -- never all
BEGIN
    CASE kind
        WHEN 'memberships' THEN RETURN QUERY  -- and what their connector remembers of them
            WITH gone AS (
                DELETE FROM memberships WHERE (tenant, principal, source) IN (
                    SELECT m.tenant, m.principal, m.source FROM memberships m
                    WHERE m.groups = '{}' AND m.observed_at < before ORDER BY m.observed_at LIMIT most
                ) RETURNING tenant, source, principal, observed_at
            ), published AS (
                DELETE FROM connector_principals p USING gone g
                WHERE p.tenant = g.tenant AND p.source = g.source AND p.principal = g.principal
                    AND p.observed_at <= g.observed_at
            )
            SELECT 1 FROM gone;
        WHEN 'dead_letters' THEN RETURN QUERY  -- and their trail, which nobody else may delete
            WITH old AS (
                SELECT d.id FROM dead_letters d WHERE d.at < before ORDER BY d.at, d.id LIMIT most
            ), trail AS (
                DELETE FROM dead_letter_trail t USING old WHERE t.letter_id = old.id
            )
            DELETE FROM dead_letters l USING old WHERE l.id = old.id RETURNING 1;
        WHEN 'connector_items' THEN RETURN QUERY
            DELETE FROM connector_items WHERE (tenant, source, external_id) IN (
                SELECT i.tenant, i.source, i.external_id FROM connector_items i
                WHERE i.gone AND i.withdrawn_at IS NULL AND i.content_at < before ORDER BY i.content_at LIMIT most
            ) RETURNING 1;
        WHEN 'connector_asks' THEN RETURN QUERY
            DELETE FROM connector_asks WHERE id IN (
                SELECT a.id FROM connector_asks a WHERE a.done_at < before ORDER BY a.done_at LIMIT most
            ) RETURNING 1;
        WHEN 'answer_reviews' THEN RETURN QUERY
            DELETE FROM answer_reviews WHERE answer_id IN (
                SELECT r.answer_id FROM answer_reviews r WHERE r.asked_at < before ORDER BY r.asked_at LIMIT most
            ) RETURNING 1;
        WHEN 'answer_feedback' THEN RETURN QUERY
            DELETE FROM answer_feedback WHERE (tenant, giver, subject) IN (
                SELECT f.tenant, f.giver, f.subject FROM answer_feedback f
                WHERE f.given_at < before ORDER BY f.given_at LIMIT most
            ) RETURNING 1;
        WHEN 'eval_queries' THEN RETURN QUERY
            DELETE FROM eval_queries WHERE id IN (
                SELECT q.id FROM eval_queries q WHERE q.added_at < before ORDER BY q.added_at LIMIT most
            ) RETURNING 1;
    END CASE;
END $$;
REVOKE EXECUTE ON FUNCTION erase_by_age FROM PUBLIC;
