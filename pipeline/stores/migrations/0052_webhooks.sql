-- Webhooks (docs/adr/0066-webhooks.md): the endpoints that receive documents.indexed.v1 over HTTP, and what waits for each.
-- No secret is here: an endpoint's is derived from the salt and from a key that only processes have (PENSTOCK_WEBHOOKS_KEY).

CREATE TABLE webhooks (
    name            text        PRIMARY KEY CHECK (name ~ '^[a-z0-9][a-z0-9._-]{0,99}$'),
    tenant          text        NOT NULL,
    sources         text[]      NOT NULL DEFAULT '{}',       -- patterns, * stands for any characters; empty: all
    url             text        NOT NULL CHECK (octet_length(url) <= 8000),
    private         boolean     NOT NULL,                    -- may be an address that is not public, and http
    salt            bytea       NOT NULL CHECK (octet_length(salt) <= 16),
    salt_check      bytea       NOT NULL CHECK (octet_length(salt_check) <= 8),
    old_salt        bytea       CHECK (octet_length(old_salt) <= 16),
    old_salt_check  bytea       CHECK (octet_length(old_salt_check) <= 8),
    old_until       timestamptz,                             -- until then, requests are signed with the old secret too
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    paused_at       timestamptz,
    reason          text        CHECK (octet_length(reason) <= 2000),  -- of the last failure, or why it is paused
    failing_since   timestamptz,                             -- NULL: the last request was answered with success
    failures        integer     NOT NULL DEFAULT 0,          -- since then
    next_at         timestamptz,                             -- while it fails: when it is tried again
    delivered       bigint      NOT NULL DEFAULT 0,
    delivered_at    timestamptz,
    UNIQUE (name, tenant)
);

-- A row is deleted when its event is delivered. The foreign key keeps one tenant's event from another tenant's endpoint.
CREATE TABLE webhook_deliveries (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    webhook     text        NOT NULL,
    tenant      text        NOT NULL,
    document_id uuid        NOT NULL,
    state       text        NOT NULL,
    event_id    text        NOT NULL,                        -- that of the Kafka record: the same whenever it is sent
    event       text        NOT NULL,                        -- the record's value, which is the data of the CloudEvent
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempts    integer     NOT NULL DEFAULT 0,
    failed_at   timestamptz,                                 -- its first failure
    due_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason      text        CHECK (octet_length(reason) <= 2000),
    parked_at   timestamptz,                                 -- it failed for too long, and waits for an operator
    FOREIGN KEY (webhook, tenant) REFERENCES webhooks (name, tenant) ON DELETE CASCADE
);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (webhook, due_at, id) WHERE parked_at IS NULL;
CREATE INDEX webhook_deliveries_order ON webhook_deliveries (webhook, document_id, id) WHERE parked_at IS NULL;
CREATE INDEX webhook_deliveries_parked ON webhook_deliveries (webhook, id) WHERE parked_at IS NOT NULL;
CREATE INDEX webhook_deliveries_age ON webhook_deliveries (created_at);
CREATE INDEX webhook_deliveries_document ON webhook_deliveries (document_id);

-- Shown by `penstock status`, for all tenants together, to processes that may read neither table.
CREATE VIEW overview_webhooks AS
SELECT name AS webhook, tenant,
    CASE WHEN paused_at IS NOT NULL THEN 'paused' WHEN failures > 0 THEN 'failing' ELSE 'working' END AS state,
    CASE WHEN paused_at IS NOT NULL OR failures > 0 THEN reason END AS reason,
    (SELECT count(*) FROM (
        SELECT FROM webhook_deliveries d WHERE d.webhook = name AND parked_at IS NULL LIMIT 10000) few) AS waiting,
    (SELECT count(*) FROM (
        SELECT FROM webhook_deliveries d WHERE d.webhook = name AND parked_at IS NOT NULL LIMIT 10000) few) AS parked
FROM webhooks;
