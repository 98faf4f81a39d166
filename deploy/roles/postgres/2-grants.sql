-- The grants of each process. Run as the owner of the tables after every `penstock migrate`. Repeating it is harmless:
-- revokes and grants are in one transaction, so that no process is ever without its rights.
--
--   penstock_owner       `penstock migrate`, `rebuild`, `generation`, `recover`, `producer`: creates and drops tables
--   penstock_operator    `penstock forget`, `export` and withdrawals: reads and erases personal data; writes no text, access
--                        or membership, and grants nobody anything
--   penstock_worker      detect, vectors, keywords; `penstock audit`, `dead`, `why`: writes the ledger and the vectors
--   penstock_analysis    analysis: reads the ledger and the vectors; writes only what its tasks found
--   penstock_connectors  connectors: their own checkpoints and the uploads, and nothing that was read from a source
--   penstock_query       serve, mcp, search, ask, status: reads; writes only feedback, the review queue and the evaluation
--   penstock_canaries    canary: reads the documents of canaries, and no row of another source
--   penstock_trail_reader  `penstock trail`: reads the audit trail, and records that it did
--   penstock_reader      other teams' query services: only the schema `readers` (migration 0013)
BEGIN;

-- Every generation has a chunk table of its own, which is created while everything runs (`penstock rebuild`): its users
-- need their rights from the beginning. Tables of later migrations get the same rights until this file is run again.
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO penstock_worker;
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO penstock_query;

REVOKE ALL ON ALL TABLES IN SCHEMA public FROM penstock_worker, penstock_connectors, penstock_query;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM penstock_worker, penstock_connectors, penstock_query;
GRANT USAGE ON SCHEMA public TO penstock_worker, penstock_connectors, penstock_query;
GRANT SELECT ON schema_migrations, fence TO penstock_worker, penstock_connectors, penstock_query;

-- Existing chunk tables.
DO $$
DECLARE
    chunks regclass;
BEGIN
    FOR chunks IN SELECT DISTINCT to_regclass(quote_ident(chunk_table)) FROM generations LOOP
        IF chunks IS NOT NULL THEN  -- that of a retired generation was dropped
            EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO penstock_worker', chunks);
            EXECUTE format('GRANT SELECT ON %s TO penstock_query', chunks);
        END IF;
    END LOOP;
END $$;

-- The workers. They may not create generations; the first one to start records the model's reference and centre.
GRANT SELECT ON generations, builds TO penstock_worker;
GRANT UPDATE (reference, calibration, everyday, centre) ON generations TO penstock_worker;
GRANT UPDATE (tokens) ON builds TO penstock_worker;
GRANT USAGE ON SEQUENCE ledger_seq TO penstock_worker;
GRANT SELECT, INSERT, UPDATE ON
    document_bodies, index_state, dead_letters, memberships, conversation_floors, handled, kafka_marks, keyword_indexes
    TO penstock_worker;
GRANT INSERT ON generations_lock TO penstock_worker;  -- allows the shared lock, and no row
GRANT SELECT, INSERT ON dead_letter_trail TO penstock_worker;  -- rows are added and never changed …
GRANT SELECT, INSERT, UPDATE, DELETE ON
    documents, document_events, access_sets, manifests, superseded, open_bulks, audit_runs, audit_documents,
    audit_differences, embedding_days, conversation_members, conversation_pairs, conversation_mentions, conversation_chunks, conversation_provenance
    TO penstock_worker;
GRANT SELECT ON membership_floors, person_floors TO penstock_worker;  -- `penstock forget` and erasure by age raise them
-- The producers' rights: only the owner enrols producers.
GRANT SELECT ON producers, producer_keys TO penstock_worker, penstock_query;
GRANT SELECT ON metadata_keys TO penstock_worker, penstock_query;  -- only the owner declares keys
-- A repair says that a store lacked something.
GRANT SELECT, UPDATE (reopened_at) ON connector_freshness TO penstock_worker;
GRANT SELECT ON answer_provenance TO penstock_worker;  -- copied when a conversation names it
-- Detect's metrics and the page show the state of connectors, but never their cursors and addresses.
GRANT SELECT
    (tenant, source, kind, paused, loaded_at, guard, activities, counts, seen_at, removed_at, access_every_seconds)
    ON connectors
    TO penstock_worker, penstock_query;

-- … and deleted by age, like everything else (pipeline/maintenance/retention.py).
GRANT EXECUTE ON FUNCTION erase_by_age, erase_use_by_age, erase_standing_answers TO penstock_worker;

-- `penstock why` shows what happened to one document at its source.
GRANT SELECT
    (tenant, source, external_id, version, gone, problem_code, problem_message, content_at, access_at, swept_at,
        in_doubt_since, difference, difference_at, withdrawn_at, unlisted_since)
    ON connector_items TO penstock_worker;

-- The connectors.
GRANT SELECT, INSERT, UPDATE, DELETE ON
    connectors, connector_items, connector_sources, connector_asks, connector_groups, connector_principals,
    connector_memory, connector_differences, connector_publications, uploads
    TO penstock_connectors;
GRANT SELECT, INSERT, UPDATE ON connector_freshness TO penstock_connectors;
GRANT USAGE, SELECT ON SEQUENCE uploads_changed TO penstock_connectors;
-- Webhooks: only the owner adds receivers. The salts are no secrets without PENSTOCK_WEBHOOKS_KEY.
GRANT SELECT ON webhooks TO penstock_connectors;
GRANT UPDATE (paused_at, reason, failing_since, failures, next_at, delivered, delivered_at) ON webhooks
    TO penstock_connectors;
GRANT SELECT, INSERT, UPDATE, DELETE ON webhook_deliveries TO penstock_connectors;
GRANT SELECT ON handled TO penstock_connectors;
GRANT EXECUTE ON FUNCTION ledger_documents, ledger_lacks, ledger_letters, ledger_members, ledger_lacks_members
    TO penstock_connectors;
GRANT EXECUTE ON FUNCTION forget_applied_publications, active_generation, source_is_settled, members_are_applied
    TO penstock_connectors;
GRANT EXECUTE ON FUNCTION lead_webhooks, lead_connector, lock_uploads, lock_uploads_quota, uploads_usage
    TO penstock_connectors;

-- The query service.
GRANT SELECT ON
    generations, builds, documents, access_sets, document_bodies, document_events, manifests, index_state, memberships,
    dead_letters, audit_runs, embedding_days, keyword_indexes, connector_freshness,
    conversation_members, conversation_pairs, conversation_mentions, conversation_chunks, conversation_provenance
    TO penstock_query;
-- Counted for all tenants together, without the external ids.
GRANT SELECT (run_id, document_id, store, kind, repaired) ON audit_differences TO penstock_query;
GRANT SELECT, INSERT, UPDATE, DELETE ON
    answer_provenance, answer_reviews, answer_feedback, eval_queries, eval_judgements, eval_runs, shadow_agreement,
    conflict_decisions, standing_questions, standing_passages
    TO penstock_query;
GRANT SELECT ON conflicts, standing_changes TO penstock_query;
GRANT EXECUTE ON FUNCTION readable_sets, expire_provenance, lead_query_service, golden_tenants, is_forgotten_since
    TO penstock_query;
-- `penstock why --as` reads what a person may read, with any login.
GRANT EXECUTE ON FUNCTION readable_sets TO penstock_worker;
-- Shown for all tenants together: numbers, and names of sources.
GRANT SELECT ON overview_documents, overview_canaries, overview_letters, overview_webhooks TO penstock_worker, penstock_query;
GRANT EXECUTE ON FUNCTION overview_chunks TO penstock_worker, penstock_query;
-- Budgets are counted by a function, so that recorded use cannot be reduced, and a process returns at most what it was
-- given. `use_budget` is the function of the previous version. `penstock budget` reads today's use of all tenants.
GRANT EXECUTE ON FUNCTION settle_budget, use_budget TO penstock_query;
GRANT SELECT ON overview_use TO penstock_query;

-- The canary. It reads views, which show it the rows of canaries alone (migration 0116), and tables of what belongs to nobody.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'penstock_canaries') THEN  -- or 1-roles.sql is of an older version
        REVOKE ALL ON ALL TABLES IN SCHEMA public, trail FROM penstock_canaries;
        REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM penstock_canaries;
        GRANT USAGE ON SCHEMA public, canaries TO penstock_canaries;
        GRANT SELECT ON ALL TABLES IN SCHEMA canaries TO penstock_canaries;
        GRANT EXECUTE ON FUNCTION canaries.passages TO penstock_canaries;
        GRANT SELECT ON schema_migrations, fence, generations, keyword_indexes TO penstock_canaries;
        GRANT SELECT (tenant, source, removed_at) ON connectors TO penstock_canaries;
        GRANT EXECUTE ON FUNCTION readable_sets, lead_query_service TO penstock_canaries;
    END IF;
END $$;

-- The analysis worker.
DO $$
DECLARE
    chunks regclass;
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'penstock_analysis') THEN  -- or 1-roles.sql is of an older version
        ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO penstock_analysis;
        REVOKE ALL ON ALL TABLES IN SCHEMA public, trail FROM penstock_analysis;
        REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM penstock_analysis;
        GRANT USAGE ON SCHEMA public TO penstock_analysis;
        GRANT SELECT ON
            schema_migrations, fence, generations, documents, access_sets, manifests, index_state, memberships,
            standing_questions, standing_passages
            TO penstock_analysis;
        GRANT SELECT, INSERT, UPDATE, DELETE ON conflicts, conflict_examined, standing_changes TO penstock_analysis;
        GRANT UPDATE (probe, probe_generation, words, names, anchors, words_floor) ON standing_questions
            TO penstock_analysis;
        GRANT EXECUTE ON FUNCTION readable_sets TO penstock_analysis;
        FOR chunks IN SELECT DISTINCT to_regclass(quote_ident(chunk_table)) FROM generations LOOP
            IF chunks IS NOT NULL THEN
                EXECUTE format('GRANT SELECT ON %s TO penstock_analysis', chunks);
            END IF;
        END LOOP;
    END IF;
END $$;

-- The audit trail (docs/trail.md). Processes that act add records and link them to its newest head; its reader reads it; the
-- worker drops what is old enough, a day at a time. Only the owner can change or delete a row.
REVOKE ALL ON ALL TABLES IN SCHEMA trail FROM penstock_worker, penstock_connectors, penstock_query;
GRANT USAGE ON SCHEMA trail TO penstock_worker, penstock_connectors, penstock_query;
GRANT INSERT ON trail.records TO penstock_worker, penstock_connectors, penstock_query;
GRANT SELECT, INSERT ON trail.heads TO penstock_worker, penstock_connectors, penstock_query;
GRANT EXECUTE ON FUNCTION trail.prepare TO penstock_worker, penstock_connectors, penstock_query;
GRANT EXECUTE ON FUNCTION trail.expire TO penstock_worker;
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'penstock_trail_reader') THEN  -- or 1-roles.sql is of an older version
        REVOKE ALL ON ALL TABLES IN SCHEMA trail FROM penstock_trail_reader;
        GRANT USAGE ON SCHEMA trail TO penstock_trail_reader;
        GRANT SELECT, INSERT ON trail.records, trail.heads TO penstock_trail_reader;
        GRANT EXECUTE ON FUNCTION trail.prepare TO penstock_trail_reader;
    END IF;
END $$;

-- The operator's commands read and erase the columns that pipeline.ledger.personal names. They remove names from rows that
-- stay, and have keyword entries written again. Withdrawals are published on the wire; the connector's rows are marked here.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'penstock_operator') THEN  -- or 1-roles.sql is of an older version
        ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT, DELETE ON TABLES TO penstock_operator;
        REVOKE ALL ON ALL TABLES IN SCHEMA public, trail FROM penstock_operator;
        REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM penstock_operator;
        GRANT USAGE ON SCHEMA public, trail TO penstock_operator;
        GRANT SELECT ON schema_migrations, fence TO penstock_operator;
        GRANT SELECT, INSERT ON trail.records TO penstock_operator;  -- a person's export includes the records about the person
        GRANT SELECT, INSERT ON trail.heads TO penstock_operator;
        GRANT EXECUTE ON FUNCTION trail.prepare TO penstock_operator;
        GRANT SELECT ON
            generations, documents, access_sets, document_bodies, document_events, superseded, manifests, index_state, handled,
            memberships, membership_floors, person_floors, dead_letters, dead_letter_trail, audit_differences, uploads,
            connectors, connector_items, connector_sources, connector_asks, connector_groups, connector_principals,
            connector_memory, connector_differences, connector_publications, connector_freshness,
            conversation_members, conversation_pairs, conversation_mentions, conversation_chunks, conversation_floors,
            conversation_provenance, answer_provenance, answer_reviews, answer_feedback, eval_queries, eval_judgements,
            query_use, webhook_deliveries, standing_questions, standing_passages, standing_changes
            TO penstock_operator;
        GRANT UPDATE (sentences) ON standing_questions TO penstock_operator;
        GRANT UPDATE (reopened_at) ON connector_freshness TO penstock_operator;
        GRANT DELETE ON
            access_sets, document_events, superseded, manifests, memberships, dead_letters, dead_letter_trail, audit_differences, uploads,
            connector_items, connector_asks, connector_groups, connector_principals, connector_memory, connector_differences,
            conversation_members, conversation_pairs, conversation_mentions, conversation_chunks, conversation_provenance,
            answer_reviews, answer_feedback, eval_queries, query_use, webhook_deliveries, standing_questions
            TO penstock_operator;
        GRANT UPDATE (external_id, title, source_url, author, source_modified_at, keys, erased_at, access_id) ON documents
            TO penstock_operator;
        GRANT UPDATE (text, metadata) ON document_bodies TO penstock_operator;
        GRANT UPDATE (author, metadata) ON superseded TO penstock_operator;
        GRANT UPDATE (seq, announced_seq) ON documents TO penstock_operator;
        GRANT USAGE ON SEQUENCE ledger_seq TO penstock_operator;
        GRANT UPDATE ON connector_groups TO penstock_operator;
        -- Removal ends the runner of a connector, and withdrawal has it begin anew.
        GRANT UPDATE (
            removed_at, epoch, seen_at, worker, address, changes_cursor, full_cursor, full_state, loaded_at, groups_listing, guard,
            activities, problems, reconciliation
            ) ON connectors TO penstock_operator;
        GRANT INSERT (tenant, source, scope, external_id, version, withdrawn_at, in_doubt_since) ON connector_items
            TO penstock_operator;
        GRANT UPDATE (
            fingerprint, revision, stat, gone, problem_code, problem_message, content_at, access_at, withdrawn_at, in_doubt_since
            ) ON connector_items TO penstock_operator;
        GRANT UPDATE (asked_at) ON conversation_pairs TO penstock_operator;
        GRANT INSERT, UPDATE (position, first_at, last_at) ON conversation_chunks TO penstock_operator;
        GRANT INSERT, UPDATE (tokens, is_chunked, chunked_at) ON conversation_members TO penstock_operator;
        GRANT INSERT (document_id, generation, store, want_seq, next_at), UPDATE (want_seq, next_at, pending_since, attempts, error)
            ON index_state TO penstock_operator;
        GRANT INSERT, UPDATE (observed_at) ON connector_sources, membership_floors, person_floors TO penstock_operator;
        GRANT EXECUTE ON FUNCTION ledger_documents, uploads_usage TO penstock_operator;
    END IF;
END $$;
DO $$
DECLARE
    chunks regclass;
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'penstock_operator') THEN
        FOR chunks IN SELECT DISTINCT to_regclass(quote_ident(chunk_table)) FROM generations LOOP
            IF chunks IS NOT NULL THEN
                EXECUTE format('GRANT SELECT, DELETE ON %s TO penstock_operator', chunks);
            END IF;
        END LOOP;
    END IF;
END $$;

COMMIT;

-- Row security by tenant for members of penstock_query, and by source for those of penstock_canaries. It is here because roles
-- and grants may come after the tables. It is applied once, and not while a query service of an earlier version is connected (docs/upgrade.md).
DO $$ BEGIN PERFORM divide_rows(); END $$;
