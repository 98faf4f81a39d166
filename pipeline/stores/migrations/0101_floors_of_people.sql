-- Until when a person was forgotten (`penstock forget person`): what was observed of the person's groups until then changes nothing any
-- more (docs/adr/0111-floors-of-people.md). A digest of the name, as conversation_floors has. Rows are never removed.
CREATE TABLE person_floors (
    tenant      text        NOT NULL,
    subject     bytea       NOT NULL,
    observed_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, subject)
);
