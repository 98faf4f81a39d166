-- Until when a person was forgotten (`penstock forget person`): what was observed of the person's groups until then changes nothing any
-- more (docs/adr/0111-floors-of-people.md). A digest of the name, as conversation_floors has. Rows are never removed.
CREATE TABLE person_floors (
    tenant      text        NOT NULL,
    subject     bytea       NOT NULL,
    observed_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, subject)
);

-- Memberships that are erased by age leave their time with their source: what was observed until then and is not known is a copy of
-- what was erased.
DO $$
DECLARE
    definition text := pg_get_functiondef('erase_by_age(text, double precision, integer)'::regprocedure);
    before     text := E'            )\n            SELECT 1 FROM gone;';
BEGIN
    ASSERT strpos(definition, before) > 0;
    EXECUTE replace(definition, before, $new$            ), floors AS (
                INSERT INTO membership_floors AS f
                SELECT g.tenant, g.source, max(g.observed_at) FROM gone g GROUP BY g.tenant, g.source
                ON CONFLICT (tenant, source) DO UPDATE SET observed_at = greatest(f.observed_at, EXCLUDED.observed_at)
            )
            SELECT 1 FROM gone;$new$);
END $$;
