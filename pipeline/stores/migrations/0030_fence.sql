-- Which server, and which of its timelines, this ledger was last accepted on, and how far a recovery has come. A promoted
-- standby and a restored base backup are on another timeline, a restored dump is on another server: until `penstock
-- recover` has accepted it, no question is answered from such a ledger (docs/adr/0038-fencing.md). One row.
CREATE TABLE fence (
    only_row          boolean     PRIMARY KEY DEFAULT true CHECK (only_row),
    system_identifier bigint      NOT NULL,
    timeline          bigint      NOT NULL,
    state             text        NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'replaying', 'rewinding')),
    accepted_at       timestamptz NOT NULL DEFAULT now()
);
-- The control file's timeline lags behind a promotion until the next checkpoint; the name of the current WAL file does not.
INSERT INTO fence (system_identifier, timeline)
SELECT system_identifier, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint FROM pg_control_system();
