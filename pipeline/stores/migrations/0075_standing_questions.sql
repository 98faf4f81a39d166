-- Standing questions (docs/standing.md): kept answers, and the passages behind each of their sentences, by which their asker
-- learns that an answer no longer holds. An answer's own text is here; that of its passages is not.
CREATE TABLE standing_questions (
    tenant           text        NOT NULL,
    id               uuid        NOT NULL,
    principal        text        NOT NULL CHECK (principal <> ''),  -- who asked; the groups are looked up when it matters
    question         text        NOT NULL,
    request          jsonb       NOT NULL,              -- mode, documents, collection, top and filters
    sentences        jsonb       NOT NULL,              -- [{text, cites: [numbers of passages]}]; []: erased
    model            text,                              -- NULL: the answer quotes passages
    generation       text        NOT NULL,              -- that of the passages' chunks
    stored_at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    asked_at         timestamptz NOT NULL DEFAULT clock_timestamp(),  -- when this answer was given
    probe            halfvec,                           -- the question's vector, and its floor (query/standing/probe.py)
    probe_generation text,                              -- the generation of the probe; NULL: it is not embedded yet
    PRIMARY KEY (tenant, id),
    CHECK (octet_length(question) <= 32000 AND octet_length(sentences::text) <= 1000000 AND octet_length(request::text) <= 1000000)
);
CREATE INDEX standing_questions_of ON standing_questions (tenant, principal, stored_at DESC, id);
CREATE INDEX standing_questions_age ON standing_questions (asked_at);
CREATE INDEX standing_questions_probes ON standing_questions (tenant, probe_generation);

CREATE TABLE standing_passages (
    tenant       text     NOT NULL,
    question_id  uuid     NOT NULL,
    n            smallint NOT NULL,  -- the passage's number in the answer: [n]
    chunk_id     uuid     NOT NULL,  -- derived from the chunk's text: while it is in the manifest, the text is the same
    document_id  uuid     NOT NULL,
    content_hash bytea,              -- of the document; NULL: the chunk was gone when the answer was kept
    PRIMARY KEY (tenant, question_id, n, chunk_id),
    FOREIGN KEY (tenant, question_id) REFERENCES standing_questions (tenant, id) ON DELETE CASCADE
);
CREATE INDEX standing_passages_by_document ON standing_passages (document_id);

-- The graph of a generation's probes: the nearest questions of a new chunk by their margin.
CREATE FUNCTION prepare_probes(generation text, dimensions integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF dimensions + 1 > 4000 THEN
        RETURN;  -- more than a graph of halfvec takes: probes are compared one by one
    END IF;
    EXECUTE format(
        'CREATE INDEX IF NOT EXISTS %I ON standing_questions USING hnsw ((probe::halfvec(%s)) halfvec_l2_ops)'
        ' WITH (m = 16, ef_construction = 64) WHERE probe_generation = %L',
        'standing_probes_' || generation, dimensions + 1, generation
    );
END $$;
REVOKE EXECUTE ON FUNCTION prepare_probes FROM PUBLIC;
SELECT prepare_probes(name, dimensions) FROM generations WHERE state <> 'retired';

DO $$
DECLARE
    definition text := pg_get_functiondef('erase_by_age(text, double precision, integer)'::regprocedure);
BEGIN
    EXECUTE replace(definition, 'END CASE;', $case$
        WHEN 'standing_questions' THEN RETURN QUERY
            DELETE FROM standing_questions WHERE (tenant, id) IN (
                SELECT q.tenant, q.id FROM standing_questions q WHERE q.asked_at < before ORDER BY q.asked_at LIMIT most
            ) RETURNING 1;
    END CASE;$case$);
END $$;
