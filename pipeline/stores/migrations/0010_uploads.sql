-- Files that were handed to us: their owner's words about them, and what became of each. The originals lie in a folder,
-- by the hash of their content.

CREATE SEQUENCE uploads_changed;

CREATE TABLE uploads (
    id            uuid        PRIMARY KEY,
    tenant        text        NOT NULL,
    source        text        NOT NULL,               -- the instance that they were handed to
    external_id   text        COLLATE "C" NOT NULL,   -- the owner's own, else the id
    version       bigint      NOT NULL,               -- grows with every file and every change of words
    file_name     text        NOT NULL,               -- sanitised; never a path of ours
    media_type    text,                               -- as declared
    title         text,                               -- NULL: the file's own
    sha256        text        NOT NULL,               -- names the original
    size          bigint      NOT NULL,
    acl_tags      text[]      NOT NULL,
    required_tags text[]      NOT NULL,
    metadata      jsonb       NOT NULL,
    received_at   timestamptz NOT NULL DEFAULT now(),
    modified_at   timestamptz NOT NULL DEFAULT now(), -- when its content last changed
    changed       bigint      NOT NULL,               -- of uploads_changed, drawn under a lock: changes are read in its order
    extracting_at timestamptz,                        -- since when `version` is being read
    extracted_at  timestamptz,                        -- when it was read to its end
    problem_code  text,                               -- why that gave no text; NULL: it did
    problem       text,
    deleted_at    timestamptz,
    UNIQUE (tenant, source, external_id)
);
CREATE INDEX uploads_by_change ON uploads (tenant, source, changed);
CREATE INDEX uploads_by_hash ON uploads (tenant, source, sha256);
