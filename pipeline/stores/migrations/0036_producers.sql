-- Who may publish what (docs/adr/0047-producer-authorisation.md): the public keys of enrolled producers, and the tenants
-- and sources for which each may speak. There is no secret here: private keys are with the producers.

CREATE TABLE producers (
    name        text        PRIMARY KEY,
    allow       text[]      NOT NULL CHECK (cardinality(allow) > 0),  -- tenant/source; * stands for any characters
    valid_from  timestamptz NOT NULL DEFAULT now(),
    valid_until timestamptz,                                          -- NULL: until it is removed
    created_at  timestamptz NOT NULL DEFAULT now()
);

-- Rows are not deleted: a dead letter that names a key is attributed for as long as it is kept.
CREATE TABLE producer_keys (
    key_id      text        PRIMARY KEY,            -- the first 32 hexadecimal digits of SHA-256(public_key)
    producer    text        NOT NULL REFERENCES producers (name),
    public_key  bytea       NOT NULL CHECK (length(public_key) = 32),  -- Ed25519
    valid_from  timestamptz NOT NULL DEFAULT now(),
    valid_until timestamptz,
    created_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX producer_keys_of ON producer_keys (producer);

-- A group called user:NAME opened everything that NAME alone may read. Such groups are refused at intake from now on.
UPDATE memberships SET groups = ARRAY(SELECT g FROM unnest(groups) g WHERE g NOT LIKE 'user:%')
WHERE EXISTS (SELECT FROM unnest(groups) g WHERE g LIKE 'user:%');
