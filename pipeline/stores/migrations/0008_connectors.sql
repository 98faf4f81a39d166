-- Connectors that a runner runs: what it remembers of each instance, and what it is asked to do.

ALTER TABLE connector_items
    ADD COLUMN revision   text,                            -- as a listing shows it; NULL: cannot tell
    ADD COLUMN content_at timestamptz,                     -- when what the row says of content was asked for (a stamp)
    ADD COLUMN access_at  timestamptz,                     -- likewise of access
    ADD COLUMN gone       boolean NOT NULL DEFAULT false;  -- a delete was published: the row keeps version and stamps
CREATE INDEX connector_items_problems ON connector_items (tenant, source, problem_code) WHERE problem_code IS NOT NULL;

CREATE TABLE connectors (
    tenant         text NOT NULL,
    source         text NOT NULL,             -- the instance's name
    kind           text NOT NULL,
    epoch          bigint NOT NULL DEFAULT 0, -- grows with every runner: one that lost its lease can write no more
    paused         boolean NOT NULL DEFAULT false,
    changes_cursor jsonb,                     -- NULL: never started
    full_cursor    jsonb,                     -- after the last page that Kafka and connector_items have
    full_state     text NOT NULL DEFAULT 'due' CHECK (full_state IN ('due', 'running', 'done')),
    loaded_at      timestamptz,               -- when a full read first came to its end
    guard          jsonb,                     -- the sweep that wanted to delete too much; NULL: none waits
    activities     jsonb NOT NULL DEFAULT '{}', -- name → {state, reason, since, succeeded_at, …}, for status
    counts         jsonb NOT NULL DEFAULT '{}', -- published by kind, ever
    problems       jsonb NOT NULL DEFAULT '[]', -- of the instance; those of a document stand in its row
    worker         text,                      -- who runs it: host:pid
    address        text,                      -- where that worker takes events
    seen_at        timestamptz,               -- its last sign of life
    PRIMARY KEY (tenant, source)
);

-- What somebody asked for (`penstock connector run`): done once, by whichever runner holds the instance.
CREATE TABLE connector_asks (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant    text NOT NULL,
    source    text NOT NULL,
    action    text NOT NULL,
    argument  text,
    asked_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    done_at   timestamptz,
    outcome   jsonb,                          -- counts; or {"error": one line}
    FOREIGN KEY (tenant, source) REFERENCES connectors ON DELETE CASCADE
);
CREATE INDEX connector_asks_open ON connector_asks (tenant, source, id) WHERE done_at IS NULL;

-- Who holds a tag, as the source last listed it …
CREATE TABLE connector_groups (
    tenant      text NOT NULL,
    source      text NOT NULL,
    tag         text NOT NULL,
    members     text[] NOT NULL,
    of          text[] NOT NULL,              -- tags whose holders hold this one too
    observed_at timestamptz NOT NULL,         -- stamped before the listing was asked for
    PRIMARY KEY (tenant, source, tag)
);

-- … and what was published of it: a row only after Kafka has acknowledged it.
CREATE TABLE connector_principals (
    tenant      text NOT NULL,
    source      text NOT NULL,
    principal   text NOT NULL,
    digest      bytea NOT NULL,               -- SHA-256 of the full set of tags
    observed_at timestamptz NOT NULL,         -- of the message
    PRIMARY KEY (tenant, source, principal)
);

-- What a source itself keeps (push channels and when they end).
CREATE TABLE connector_memory (
    tenant text NOT NULL,
    source text NOT NULL,
    name   text NOT NULL,
    value  jsonb NOT NULL,
    PRIMARY KEY (tenant, source, name)
);
