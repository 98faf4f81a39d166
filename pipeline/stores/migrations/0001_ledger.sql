-- The ledger: what shall be. Postgres is the truth; both stores converge to it.

CREATE EXTENSION IF NOT EXISTS vector;

-- Every accepted change draws from here, under the document's row lock.
CREATE SEQUENCE ledger_seq;

-- Interned access: a caller needs any of acl_tags and all of required_tags. Tags are stored as source/tag.
CREATE TABLE access_sets (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant        text   NOT NULL,
    digest        bytea  NOT NULL,          -- SHA-256 of both lists: they can be longer than an index row may be
    acl_tags      text[] NOT NULL,
    required_tags text[] NOT NULL,
    UNIQUE (tenant, digest)
);

-- Rows are never removed: a forgotten version resurrects.
CREATE TABLE documents (
    id                 uuid PRIMARY KEY,    -- uuid5 of tenant/source/external_id
    tenant             text NOT NULL,
    source             text NOT NULL,
    external_id        text NOT NULL,
    seq                bigint NOT NULL DEFAULT 0,
    announced_seq      bigint NOT NULL DEFAULT 0,
    version            bigint,              -- NULL: no content seen yet (a stub)
    observed_at        timestamptz,
    deleted_floor      timestamptz,         -- the newest delete's observed_at: upserts not observed after it are ignored
    deleted_at         timestamptz,         -- NULL: alive
    access_observed_at timestamptz,
    access_id          bigint REFERENCES access_sets,
    content_hash       bytea,               -- SHA-256 of the normalised text
    meta_hash          bytea,
    title              text,
    source_url         text,
    author             text,
    media_type         text,
    source_modified_at timestamptz,
    received_at        timestamptz NOT NULL DEFAULT now(),
    changed_at         timestamptz,         -- when the source changed, as far as we know: freshness counts from here
    lane               text NOT NULL DEFAULT 'live',
    event_count        bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 80);
CREATE INDEX documents_access ON documents (tenant, access_id);
CREATE INDEX documents_external_id ON documents USING hash (external_id);
CREATE INDEX documents_unannounced ON documents (seq) WHERE announced_seq < seq;

CREATE TABLE document_bodies (
    document_id uuid PRIMARY KEY REFERENCES documents,
    text        text  NOT NULL,             -- normalised; every rebuild starts here
    metadata    jsonb NOT NULL DEFAULT '{}'
);

-- A short ring of what happened to a document, for `why`: slot n of documents.event_count modulo 16.
CREATE TABLE document_events (
    document_id uuid NOT NULL REFERENCES documents,
    slot        smallint NOT NULL,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    kind        text NOT NULL,
    outcome     text NOT NULL,
    version     bigint,
    observed_at timestamptz,
    seq         bigint,
    lane        text NOT NULL,
    PRIMARY KEY (document_id, slot)
);

CREATE TABLE generations (
    name            text PRIMARY KEY,
    state           text NOT NULL CHECK (state IN ('building', 'active', 'previous', 'retired')),
    model           text NOT NULL,
    revision        text NOT NULL,
    dimensions      integer NOT NULL,
    input_window    integer NOT NULL,
    params          jsonb NOT NULL,
    document_prefix text NOT NULL DEFAULT '',
    query_prefix    text NOT NULL DEFAULT '',
    chunk_table     text NOT NULL,
    keyword_index   text NOT NULL,
    vector_type     text NOT NULL DEFAULT 'halfvec' CHECK (vector_type IN ('halfvec', 'vector')),
    reference       real[],                 -- the reference text's vector: another model under the same name is refused
    created_at      timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX one_active_generation ON generations (state) WHERE state = 'active';

-- What a generation wants of a document: chunks in reading order. Chunk text is document_bodies.text cut by spans.
CREATE TABLE manifests (
    document_id  uuid NOT NULL REFERENCES documents,
    generation   text NOT NULL REFERENCES generations,
    content_hash bytea NOT NULL,
    chunk_ids    uuid[] NOT NULL,
    token_counts integer[] NOT NULL,
    spans        jsonb NOT NULL,            -- [[[start, end], …], …] in code points
    headings     jsonb NOT NULL,            -- [[outermost, …], …]
    PRIMARY KEY (document_id, generation)
);

-- How far each store is. Pending ⇔ seq < want_seq.
CREATE TABLE index_state (
    document_id      uuid NOT NULL REFERENCES documents,
    generation       text NOT NULL REFERENCES generations,
    store            text NOT NULL CHECK (store IN ('vectors', 'keywords')),
    want_seq         bigint NOT NULL,
    seq              bigint NOT NULL DEFAULT 0,
    pending_since    timestamptz NOT NULL DEFAULT now(),
    next_at          timestamptz NOT NULL DEFAULT now(),
    settled_at       timestamptz,
    claimed          uuid[] NOT NULL DEFAULT '{}',   -- may stand in Elasticsearch
    confirmed        uuid[] NOT NULL DEFAULT '{}',   -- stood there after a refresh …
    confirmed_hashes bigint[] NOT NULL DEFAULT '{}', -- … as this hash of (id, headings, metadata, access)
    refused          uuid[] NOT NULL DEFAULT '{}',   -- can never be embedded: the document is partial
    written          bigint NOT NULL DEFAULT 0,      -- chunks embedded (vectors) or written (keywords), ever
    attempts         integer NOT NULL DEFAULT 0,
    error            text,
    PRIMARY KEY (document_id, generation, store)
) WITH (fillfactor = 70);
CREATE INDEX index_state_pending ON index_state (next_at) WHERE seq < want_seq;

CREATE TABLE dead_letters (
    id              text PRIMARY KEY,       -- topic:partition:offset
    topic           text NOT NULL,
    partition       integer NOT NULL,
    "offset"        bigint NOT NULL,
    stage           text NOT NULL,
    code            text NOT NULL,
    message         text NOT NULL,
    document_id     uuid,
    tenant          text,
    source          text,
    external_id     text,
    at              timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX dead_letters_document ON dead_letters (document_id);

CREATE TABLE memberships (
    tenant      text NOT NULL,
    source      text NOT NULL,
    principal   text NOT NULL,
    groups      text[] NOT NULL,
    observed_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, principal, source)
);

-- For other teams: documents and chunks as views, and a role that can read nothing else.
CREATE SCHEMA readers;
CREATE VIEW readers.documents AS
SELECT d.id, d.tenant, d.source, d.external_id, d.title, d.source_url, d.author, d.media_type, d.source_modified_at,
       d.version, d.seq, a.acl_tags, a.required_tags
FROM documents d JOIN access_sets a ON a.id = d.access_id
WHERE d.deleted_at IS NULL AND d.version IS NOT NULL;

DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'penstock_reader') THEN
        CREATE ROLE penstock_reader NOLOGIN;
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN NULL;  -- roles are shared by all databases of a server
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'the role penstock_reader is missing and % may not create it: let an administrator run'
            ' `CREATE ROLE penstock_reader NOLOGIN`, then `penstock migrate` again', current_user
            USING ERRCODE = 'insufficient_privilege';
END $$;
GRANT USAGE ON SCHEMA readers TO penstock_reader;
GRANT SELECT ON readers.documents TO penstock_reader;
