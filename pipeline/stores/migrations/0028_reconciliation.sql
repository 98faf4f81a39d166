-- Connectors compare what they have published with what the ledger has accepted (docs/adr/0035-reconciliation.md).

-- Everything that was sent before this moment has been accepted, superseded or set aside as a dead letter.
CREATE TABLE handled (
    stage text PRIMARY KEY,               -- detect, identities
    until timestamptz NOT NULL            -- by this server's clock
);

CREATE INDEX documents_of_source ON documents (tenant, source, id) WHERE deleted_at IS NULL AND version IS NOT NULL;
CREATE INDEX memberships_of_source ON memberships (tenant, source, principal);

-- What a connector may know of the ledger: of its own documents their versions and access, and nothing that was read from
-- a source. Functions with their owner's rights, so that its role needs none on the ledger's tables. Each reads one page:
-- with LIMIT 1 a row is looked up by its index, where EXISTS may read a whole table into a hash. A dead letter of detect
-- says for a week why a document is not there: a bad record is published again once a week at most.
CREATE FUNCTION ledger_documents(of_tenant text, of_source text, after uuid, most integer)
RETURNS TABLE (id uuid, external_id text, version bigint, access_observed_at timestamptz, acl_tags text[],
    required_tags text[], has_letter boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT d.id, d.external_id, d.version, d.access_observed_at, a.acl_tags, a.required_tags,
        (SELECT true FROM dead_letters l WHERE l.document_id = d.id AND l.replayed_at IS NULL
            AND l.stage = 'detect' AND l.at > now() - interval '7 days' LIMIT 1) IS NOT NULL
    FROM (
        SELECT * FROM documents one
        WHERE one.tenant = of_tenant AND one.source = of_source AND one.id > after
            AND one.deleted_at IS NULL AND one.version IS NOT NULL
        ORDER BY one.id LIMIT most
    ) d LEFT JOIN access_sets a ON a.id = d.access_id
    ORDER BY d.id
$$;

CREATE FUNCTION ledger_lacks(ids uuid[]) RETURNS SETOF uuid -- neither alive there, nor set aside as a dead letter
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT given.id FROM unnest(ids) given (id)
    WHERE (SELECT true FROM documents d WHERE d.id = given.id AND d.deleted_at IS NULL AND d.version IS NOT NULL LIMIT 1)
            IS NULL
        AND (SELECT true FROM dead_letters l WHERE l.document_id = given.id AND l.replayed_at IS NULL
            AND l.stage = 'detect' AND l.at > now() - interval '7 days' LIMIT 1) IS NULL
$$;

CREATE FUNCTION ledger_members(of_tenant text, of_source text, after text, most integer)
RETURNS TABLE (principal text, observed_at timestamptz, holds boolean)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT m.principal, m.observed_at, m.groups <> '{}' FROM memberships m
    WHERE m.tenant = of_tenant AND m.source = of_source AND m.principal > after
    ORDER BY m.principal LIMIT most
$$;

CREATE FUNCTION ledger_lacks_members(of_tenant text, of_source text, principals text[]) RETURNS SETOF text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT given.principal FROM unnest(principals) given (principal)
    WHERE (
        SELECT true FROM memberships m
        WHERE m.tenant = of_tenant AND m.source = of_source AND m.principal = given.principal LIMIT 1
    ) IS NULL
$$;

REVOKE EXECUTE ON FUNCTION ledger_documents, ledger_lacks, ledger_members, ledger_lacks_members FROM PUBLIC;

-- Last, because connectors wait for these locks.
ALTER TABLE connector_items
    ADD COLUMN difference    text,        -- the kind of the last difference from the ledger that was found; NULL: none ever
    ADD COLUMN difference_at timestamptz;
ALTER TABLE connectors
    ADD COLUMN reconciliation jsonb;      -- the last comparison: at, documents, principals, found by kind, standing
