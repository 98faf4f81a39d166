-- The audit trail (docs/adr/0052-audit-trail.md). In a schema of its own: what the roles may by default in `public`,
-- read or delete, they may not here.
CREATE SCHEMA trail;

CREATE TABLE trail.records (
    day        date NOT NULL,           -- of `at` in UTC
    chain      uuid NOT NULL,           -- of one process and day
    number     bigint NOT NULL,         -- within the chain, from 1
    at         timestamptz NOT NULL,
    tenant     text NOT NULL,
    actor      text NOT NULL,           -- the principal, the name of an API key, or the user of a command
    credential text NOT NULL,           -- token, key, development, command, service
    access     text[] NOT NULL,         -- on whose access, where the actor named it
    action     text NOT NULL,
    object     text NOT NULL,           -- what it was done to, where that is no document that was shown
    documents  uuid[] NOT NULL,         -- those that were shown, the first one first
    decision   text NOT NULL,           -- allowed, refused, failed
    reason     text NOT NULL,
    address    text NOT NULL,
    request    text NOT NULL,
    process    text NOT NULL,
    key_id     text NOT NULL,
    mac        bytea NOT NULL,          -- pipeline/core/trail.py
    PRIMARY KEY (day, chain, number),
    CHECK (day = (at AT TIME ZONE 'UTC')::date)
) PARTITION BY RANGE (day);
CREATE INDEX records_at ON trail.records (at DESC, chain, number);
CREATE INDEX records_actor ON trail.records (actor, at);
CREATE INDEX records_documents ON trail.records USING gin (documents);
CREATE INDEX records_access ON trail.records USING gin (access);
CREATE INDEX records_object ON trail.records (object) WHERE object <> '';

-- How long each chain was, and how it ended, at a time: one chain over all processes.
CREATE TABLE trail.heads (
    number bigint PRIMARY KEY,
    at     timestamptz NOT NULL,
    day    date NOT NULL,
    chain  uuid NOT NULL,
    count  bigint NOT NULL,
    digest bytea NOT NULL,
    key_id text NOT NULL,
    mac    bytea NOT NULL
);
CREATE INDEX heads_day ON trail.heads (day);

-- Against mistakes: whoever may alter the tables may take this away, and `penstock trail verify` finds what follows.
CREATE FUNCTION trail.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit trail is only ever added to' USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON trail.records FOR EACH ROW EXECUTE FUNCTION trail.refuse();
CREATE TRIGGER append_only BEFORE UPDATE ON trail.heads FOR EACH ROW EXECUTE FUNCTION trail.refuse();

-- Partitions for the days around today. Whoever adds the first record of a day calls it. A partition is attached, since
-- CREATE TABLE … PARTITION OF would wait for everybody who reads the trail, and everybody who writes it for that.
CREATE FUNCTION trail.prepare() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    today  date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
    wanted date;
    name   text;
BEGIN
    PERFORM pg_advisory_xact_lock(7300039);
    FOR wanted IN SELECT today + i FROM generate_series(-1, 2) i LOOP
        name := 'records_' || to_char(wanted, 'YYYYMMDD');
        IF to_regclass('trail.' || name) IS NULL THEN
            EXECUTE format('CREATE TABLE trail.%I (LIKE trail.records INCLUDING ALL)', name);
            EXECUTE format('ALTER TABLE trail.records ATTACH PARTITION trail.%I FOR VALUES FROM (%L) TO (%L)',
                name, wanted, wanted + 1);
        END IF;
    END LOOP;
END $$;

-- What is older than so many days, never fewer than 30: the oldest partitions, and a month later their heads.
CREATE FUNCTION trail.expire(days double precision, most integer) RETURNS SETOF text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms' AS $$
DECLARE
    oldest date := (clock_timestamp() AT TIME ZONE 'UTC')::date - ceil(greatest(days, 30))::integer;
    name   text;
BEGIN
    FOR name IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'trail.records'::regclass AND c.relname < 'records_' || to_char(oldest, 'YYYYMMDD')
        ORDER BY 1 LIMIT least(most, 10)
    LOOP
        EXECUTE format('DROP %s trail.%I', 'TABLE', name);
        RETURN NEXT name;
    END LOOP;
    DELETE FROM trail.heads WHERE number < (SELECT min(h.number) FROM trail.heads h WHERE h.day >= oldest - 30);
END $$;
REVOKE EXECUTE ON FUNCTION trail.prepare, trail.expire, trail.refuse FROM PUBLIC;
SELECT trail.prepare();
