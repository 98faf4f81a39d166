-- Up to which time each source is complete in both stores (docs/consistency.md, docs/adr/0084-freshness-certificates.md).

-- What a connector has handed to Kafka, or was about to, and what is not known to be in both stores yet. A row is written
-- before anything is sent, so that a lost event, a crash or a restart leaves it here.
CREATE TABLE connector_publications (
    tenant      text        NOT NULL,
    source      text        NOT NULL,
    document_id uuid        NOT NULL,
    kind        text        NOT NULL,   -- content, access, deletion
    observed_at timestamptz NOT NULL,       -- of the newest event of this kind
    since       timestamptz NOT NULL DEFAULT clock_timestamp(), -- when the oldest of them was recorded
    PRIMARY KEY (tenant, source, document_id, kind)
);
CREATE INDEX connector_publications_since ON connector_publications (tenant, source, since);

CREATE TABLE connector_freshness (
    tenant          text NOT NULL,
    source          text NOT NULL,
    epoch           bigint NOT NULL,        -- of the runner that has recorded its publications without a gap
    tracked_since   timestamptz NOT NULL,   -- since when there was none
    equal_at        timestamptz,            -- when all that was published before was compared with the ledger, and was the same
    every_seconds   double precision NOT NULL, -- between two listings
    listed_at       timestamptz,            -- the beginning of the last complete listing, published or not
    complete_until  timestamptz,            -- what the source had before is in both stores, as it was then or later
    access_until    timestamptz,            -- so are the access rights of its documents
    groups_until    timestamptz,            -- so are the memberships
    has_gaps        boolean NOT NULL DEFAULT false, -- documents that could not be read are left out of all this
    generation      text,                   -- in whose stores
    reopened_at     timestamptz,            -- when a store turned out to lack something; NULL: nothing since
    PRIMARY KEY (tenant, source)
);

-- What a connector may know of the ledger and the stores, beyond 0028: whether they have what it published. Functions with
-- their owner's rights, as those are. Of an event whose content lost to a newer one, that one counts.
CREATE FUNCTION publication_is_applied(document uuid, kind text, observed_at timestamptz) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT coalesce((
        SELECT CASE kind
            WHEN 'access' THEN d.access_observed_at >= publication_is_applied.observed_at
            WHEN 'deletion' THEN d.deleted_floor >= publication_is_applied.observed_at
            ELSE d.observed_at >= publication_is_applied.observed_at
                OR d.deleted_floor >= publication_is_applied.observed_at
        END FROM documents d WHERE d.id = document
    ), false) AND NOT EXISTS (
        SELECT FROM index_state s JOIN generations g ON g.name = s.generation AND g.state = 'active'
        WHERE s.document_id = document AND s.seq < s.want_seq
    )
$$;

-- Forgets the oldest publications, as far as they are applied; returns how many. One that is published again meanwhile
-- is judged as it is then.
CREATE FUNCTION forget_applied_publications(of_tenant text, of_source text, most integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    WITH oldest AS MATERIALIZED (
        SELECT p.document_id, p.kind FROM connector_publications p
        WHERE p.tenant = of_tenant AND p.source = of_source AND may_connect(of_tenant) ORDER BY p.since LIMIT most
    ), applied AS (
        DELETE FROM connector_publications p USING oldest o
        WHERE p.tenant = of_tenant AND p.source = of_source AND p.document_id = o.document_id AND p.kind = o.kind
            AND publication_is_applied(p.document_id, p.kind, p.observed_at)
        RETURNING 1
    )
    SELECT count(*) FROM applied
$$;

CREATE FUNCTION active_generation() RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT name FROM generations WHERE state = 'active'
$$;

-- Whether no document of the source has waited for a store since before that time.
CREATE FUNCTION source_is_settled(of_tenant text, of_source text, until timestamptz) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT may_connect(of_tenant) AND NOT EXISTS (
        SELECT FROM index_state s JOIN generations g ON g.name = s.generation AND g.state = 'active'
        JOIN documents d ON d.id = s.document_id
        WHERE s.seq < s.want_seq AND s.pending_since <= until AND d.tenant = of_tenant AND d.source = of_source
    )
$$;

-- Whether the ledger has every set of groups that the source's connector has published.
CREATE FUNCTION members_are_applied(of_tenant text, of_source text) RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
    SELECT may_connect(of_tenant) AND NOT EXISTS (
        SELECT FROM connector_principals p LEFT JOIN memberships m
            ON m.tenant = p.tenant AND m.source = p.source AND m.principal = p.principal
        WHERE p.tenant = of_tenant AND p.source = of_source
            AND (p.digest = '' OR m.observed_at IS NULL OR m.observed_at < p.observed_at)
    )
$$;

-- As in 0068. The query service's rows of connector_freshness are divided by divide_rows(), which enables both.
ALTER TABLE connector_publications ENABLE ROW LEVEL SECURITY;
CREATE POLICY rows_of_a_login ON connector_publications
    USING ((SELECT connector_tenants()) IS NULL OR tenant = ANY ((SELECT connector_tenants())::text[]));
CREATE POLICY rows_of_a_login ON connector_freshness AS RESTRICTIVE
    USING ((SELECT connector_tenants()) IS NULL OR tenant = ANY ((SELECT connector_tenants())::text[]));

REVOKE EXECUTE ON FUNCTION publication_is_applied, forget_applied_publications, active_generation, source_is_settled,
    members_are_applied FROM PUBLIC;
