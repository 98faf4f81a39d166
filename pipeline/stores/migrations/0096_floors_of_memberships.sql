-- Until when a source was forgotten (`penstock forget source`): what was observed of its memberships until then changes nothing any
-- more, also where somebody sends its records again. Rows are never removed. Connectors may not write them, and so not lock them.
CREATE TABLE membership_floors (
    tenant      text        NOT NULL,
    source      text        NOT NULL,
    observed_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, source)
);
