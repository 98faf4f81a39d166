-- What connectors have published: their checkpoint. A row is written only after Kafka has acknowledged its event.

CREATE TABLE connector_items (
    tenant          text        NOT NULL,
    source          text        NOT NULL,
    external_id     text        COLLATE "C" NOT NULL,  -- bytewise, so that everything under a folder is one range
    scope           text        COLLATE "C" NOT NULL,  -- the root (folder, space, drive) whose sweep answers for it
    version         bigint,                            -- the last one published; NULL: never published
    fingerprint     bytea,                             -- SHA-256 of what was published but access; NULL: publish again
    stat            jsonb,                             -- how the source described it when it was read; NULL: read again
    acl_tags        text[]      NOT NULL DEFAULT '{}', -- access as published
    required_tags   text[]      NOT NULL DEFAULT '{}',
    problem_code    text,                              -- why it cannot be published as it is now
    problem_message text,
    swept_at        timestamptz NOT NULL DEFAULT clock_timestamp(), -- when a sweep last saw it
    PRIMARY KEY (tenant, source, external_id)
) WITH (fillfactor = 70);  -- sweeps update swept_at alone: room for it in the same page

-- observed_at grows per source, also across restarts.
CREATE TABLE connector_sources (
    tenant      text        NOT NULL,
    source      text        NOT NULL,
    observed_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, source)
);
