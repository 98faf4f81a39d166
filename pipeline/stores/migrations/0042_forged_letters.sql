-- A dead letter of a record that no producer in force vouches for says nothing about its document: whoever may write a
-- topic could otherwise keep a connector from repairing a document for a week (docs/adr/0035-reconciliation.md, 0047).
-- The codes are those of pipeline.core.producers.CODES.
CREATE OR REPLACE FUNCTION ledger_documents(of_tenant text, of_source text, after uuid, most integer)
RETURNS TABLE (id uuid, external_id text, version bigint, access_observed_at timestamptz, acl_tags text[],
    required_tags text[], has_letter boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT d.id, d.external_id, d.version, d.access_observed_at, a.acl_tags, a.required_tags,
        (SELECT true FROM dead_letters l WHERE l.document_id = d.id AND l.replayed_at IS NULL
            AND l.stage = 'detect' AND l.at > now() - interval '7 days'
            AND l.code <> ALL ('{unsigned,unknown_key,key_not_in_force,bad_signature,not_allowed}')
            LIMIT 1) IS NOT NULL
    FROM (
        SELECT * FROM documents one
        WHERE one.tenant = of_tenant AND one.source = of_source AND one.id > after
            AND one.deleted_at IS NULL AND one.version IS NOT NULL
        ORDER BY one.id LIMIT most
    ) d LEFT JOIN access_sets a ON a.id = d.access_id
    ORDER BY d.id
$$;

CREATE OR REPLACE FUNCTION ledger_lacks(ids uuid[]) RETURNS SETOF uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT given.id FROM unnest(ids) given (id)
    WHERE (SELECT true FROM documents d WHERE d.id = given.id AND d.deleted_at IS NULL AND d.version IS NOT NULL LIMIT 1)
            IS NULL
        AND (SELECT true FROM dead_letters l WHERE l.document_id = given.id AND l.replayed_at IS NULL
            AND l.stage = 'detect' AND l.at > now() - interval '7 days'
            AND l.code <> ALL ('{unsigned,unknown_key,key_not_in_force,bad_signature,not_allowed}')
            LIMIT 1) IS NULL
$$;

CREATE OR REPLACE FUNCTION ledger_letters(ids uuid[]) RETURNS TABLE (id uuid, at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT l.document_id, max(l.at) FROM dead_letters l
    WHERE l.document_id = ANY(ids) AND l.replayed_at IS NULL AND l.stage = 'detect'
        AND l.at > now() - interval '7 days'
        AND l.code <> ALL ('{unsigned,unknown_key,key_not_in_force,bad_signature,not_allowed}')
    GROUP BY l.document_id
$$;
