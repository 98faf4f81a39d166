"""Where Postgres may hold personal data: one list, which erasure, export and retention use.

It names every table and every column, as personal or as free of personal data; a test compares it with the migrated
schema. Free are keys that mean something only together with other tables here, times, counts, digests that cannot be
reversed, and the names of tenants and sources. CHUNKS describes the chunk tables (``chunks_…``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, LiteralString, cast
from uuid import UUID

from psycopg import sql
from psycopg.errors import LockNotAvailable
from psycopg.rows import dict_row

from pipeline.core.conversations import WHOLE_TENANT, subject_digest
from pipeline.core.fold import MAX_AHEAD
from pipeline.stores.postgres import Connection

SETS_AT_ONCE = 100
PENDING_AT_ONCE = 10_000
"""While more rows of the stores' states are pending, no unused access set is erased by age: to look at all of their
chunks would take too long."""
LOCK_ATTEMPTS, LOCK_PAUSE_SECONDS = 60, 0.5
Subject = Literal["document", "source", "tenant", "person"]


@dataclass(frozen=True, slots=True)
class Age:
    """How rows of a table are deleted by age. The statement uses an index, and deletes at most ``most`` rows."""

    setting: str
    """The field of ``RetentionSettings``, in days."""
    statement: LiteralString
    """An SQL statement with the parameters ``days`` and ``most``. Its row count is the number of rows deleted."""


@dataclass(frozen=True, slots=True)
class Place:
    """One table, which of its columns hold personal data, and how they are erased."""

    table: LiteralString
    personal: LiteralString = ""
    """Columns that may hold personal data, separated by spaces."""
    free: LiteralString = ""
    """Columns that do not hold personal data, separated by spaces."""
    erase: Mapping[Subject, LiteralString] = field(default_factory=dict)
    """SQL statements with the parameters of ``Scope``. Before those for a source or a tenant run, its documents are
    erased one by one."""
    of_person: LiteralString | None = None
    """A condition that selects the rows about a person, for export."""
    left_out: LiteralString = "embedding"
    """The column that export leaves out, where the table has it."""
    age: Age | None = None

    def __post_init__(self) -> None:
        assert self.personal or not self.of_person, f"{self.table} is said to hold nothing personal"


@dataclass(frozen=True, slots=True)
class Scope:
    """The parameters of an erasure; a field that does not apply is empty."""

    tenant: str
    source: str = ""
    person: str = ""
    ids: Sequence[Any] = ()
    """Ids of the documents of ``source``."""
    names: Sequence[str] = ()
    """External ids of these documents."""
    givers: Sequence[bytes] = ()
    """The digests under which the person's feedback may be stored (``query.answers.review``)."""
    answers: Sequence[Any] = ()
    """Ids of answers that were made from the documents, or given to the person."""
    chunks: Sequence[Any] = ()
    """Ids of the documents' chunks."""
    concerned: Sequence[str] = ()
    """The objects under which the audit trail has commands about the person (``pipeline.core.trail.Keys.names``)."""

    def parameters(self) -> dict[str, Any]:
        return {
            "tenant": self.tenant,
            "source": self.source,
            "person": self.person,
            "ids": list(self.ids),
            "names": list(self.names),
            "givers": list(self.givers),
            "answers": list(self.answers),
            "chunks": list(self.chunks),
            "concerned": list(self.concerned),
        }


_SOURCE: LiteralString = "tenant = %(tenant)s AND source = %(source)s"
_OF_SOURCE: LiteralString = f"WHERE {_SOURCE}"
_CALLS: LiteralString = (
    "tenant = %(tenant)s AND (caller IN ('token:' || %(person)s, 'development:' || %(person)s)"
    " OR starts_with(caller, 'delegated:') AND right(caller, length(%(person)s) + 1) = ':' || %(person)s)"
)
_TAGGED: LiteralString = "tenant = %(tenant)s AND (acl_tags || required_tags) @> ARRAY['user:' || %(person)s::text]"
_HELD: LiteralString = (
    "tenant = %(tenant)s AND (members @> ARRAY[%(person)s::text] OR of @> ARRAY['user:' || %(person)s::text])"
)
"""A source may list a person as a member of a group, or by the tag ``user:…`` among the tags whose holders belong to
it."""
_QUESTIONS_AS: LiteralString = (
    "tenant = %(tenant)s AND (principals @> ARRAY[%(person)s::text] OR EXISTS (SELECT FROM unnest(tags) tag"
    " WHERE tag = 'user:' || %(person)s OR right(tag, length(%(person)s) + 6) = '/user:' || %(person)s)"
    " OR answers && %(answers)s::uuid[] OR givers && %(givers)s::bytea[])"
)
_PERSON: LiteralString = "to_jsonb(%(person)s::text)"


def names_person(column: LiteralString) -> LiteralString:
    """The condition that a value of metadata, or one of a list, is the person's name. column: of type jsonb."""
    return f"EXISTS (SELECT FROM jsonb_each({column}) pair WHERE pair.value @> {_PERSON})"


def without_person(column: LiteralString) -> LiteralString:
    """The metadata without the values that are the person's name, and without keys that have no other value."""
    return (
        f"(SELECT coalesce(jsonb_object_agg(pair.key, other.value), '{{}}') FROM jsonb_each({column}) pair,"
        " LATERAL (SELECT CASE jsonb_typeof(pair.value) WHEN 'array' THEN (SELECT jsonb_agg(item)"
        f" FROM jsonb_array_elements(pair.value) item WHERE item <> {_PERSON}) ELSE pair.value END AS value) other"
        f" WHERE pair.value <> {_PERSON} AND other.value IS NOT NULL)"
    )


NAMES_PERSON: LiteralString = (
    "(d.author = %(person)s OR EXISTS (SELECT FROM document_bodies b WHERE b.document_id = d.id"
    f" AND {names_person('b.metadata')}))"
)
"""The condition that a document ``d`` has the person as its author or as a value of its metadata."""
FORGET_NAME: LiteralString = (
    "author = nullif(author, %(person)s), keys = ARRAY(SELECT term FROM unnest(keys) term"
    " WHERE substr(term, strpos(term, '=') + 1) <> normalize(%(person)s::text))"
)
"""The assignments that take a person's name from a document's row."""
_OF_TENANT: LiteralString = "WHERE tenant = %(tenant)s"
_NAMED: LiteralString = f"WHERE {_SOURCE} AND external_id = ANY(%(names)s)"
ERASED: LiteralString = (
    "title = NULL, author = NULL, source_url = NULL, source_modified_at = NULL, external_id = 'erased:' || id,"
    " keys = '{}', access_id = NULL, erased_at = clock_timestamp()"
)
"""The assignments that empty a deleted document's row. The row is found by its id, not by its external id
(docs/adr/0048-erasure.md)."""


def _aged(column: LiteralString) -> LiteralString:
    return f"{column} < now() - make_interval(secs => %(days)s * 86400)"


def _by_owner(table: LiteralString) -> LiteralString:
    """Rows that other roles write: a function of migration 0038."""
    return f"SELECT FROM erase_by_age('{table}', %(days)s, %(most)s)"


_AUTHOR_OR_VALUE: LiteralString = (
    "(author = %(person)s OR EXISTS (SELECT FROM unnest(keys) term"
    " WHERE substr(term, strpos(term, '=') + 1) = normalize(%(person)s::text)))"
)
_OF_TENANTS_DOCUMENTS: LiteralString = "document_id IN (SELECT id FROM documents WHERE tenant = %(tenant)s)"

PLACES: tuple[Place, ...] = (
    Place(
        "documents",
        personal="external_id title source_url author source_modified_at keys",
        free=(
            "id tenant source seq announced_seq version observed_at deleted_floor deleted_at "
            "access_observed_at access_id content_hash meta_hash media_type received_at changed_at lane "
            "event_count erased_at"
        ),
        erase={
            "document": f"UPDATE documents SET {ERASED} WHERE id = ANY(%(ids)s)"
            " AND (deleted_at IS NOT NULL OR version IS NULL) AND (erased_at IS NULL OR access_id IS NOT NULL)",
            "person": f"UPDATE documents SET {FORGET_NAME} WHERE tenant = %(tenant)s AND {_AUTHOR_OR_VALUE}",
        },
        of_person=f"tenant = %(tenant)s AND {_AUTHOR_OR_VALUE}",
        age=Age(
            "deleted_days",
            f"WITH erased AS (UPDATE documents SET {ERASED} WHERE id IN (SELECT id FROM documents d"
            f" WHERE {_aged('deleted_at')} AND erased_at IS NULL AND announced_seq >= seq AND NOT EXISTS"
            " (SELECT FROM index_state s WHERE s.document_id = d.id AND s.seq < s.want_seq AND s.generation IN"
            " (SELECT name FROM generations WHERE state <> 'retired'))"
            " ORDER BY deleted_at LIMIT %(most)s FOR UPDATE SKIP LOCKED) RETURNING id),"
            " events AS (DELETE FROM document_events e USING erased WHERE e.document_id = erased.id)"
            " SELECT erased.id FROM erased,"
            " (SELECT erase_standing_answers(array_agg(id)) FROM erased HAVING count(*) > 0) answers",
        ),
    ),
    Place(
        "document_bodies",
        personal="text metadata",
        free="document_id",
        erase={
            "document": "UPDATE document_bodies SET text = '', metadata = '{}' WHERE document_id = ANY(%(ids)s)"
            " AND (text, metadata) <> ('', '{}')",
            "person": f"UPDATE document_bodies SET metadata = {without_person('metadata')} WHERE"
            f" {names_person('metadata')} AND {_OF_TENANTS_DOCUMENTS}",
        },
        of_person=f"{names_person('metadata')} AND {_OF_TENANTS_DOCUMENTS}",
        left_out="text",
    ),
    Place(
        "superseded",
        personal="title source_url author source_modified_at metadata text",
        free="document_id version observed_at content_hash meta_hash media_type",
        erase={
            "document": "DELETE FROM superseded WHERE document_id = ANY(%(ids)s)",
            "person": f"UPDATE superseded SET author = nullif(author, %(person)s),"
            f" metadata = {without_person('metadata')} WHERE (author = %(person)s OR {names_person('metadata')})"
            f" AND {_OF_TENANTS_DOCUMENTS}",
        },
        of_person=f"(author = %(person)s OR {names_person('metadata')}) AND {_OF_TENANTS_DOCUMENTS}",
        age=Age(
            "superseded_days",
            "DELETE FROM superseded WHERE (document_id, observed_at, version) IN (SELECT document_id, observed_at,"
            f" version FROM superseded WHERE {_aged('observed_at')} ORDER BY observed_at LIMIT %(most)s)",
        ),
    ),
    Place(
        "manifests",
        personal="headings",
        free="document_id generation content_hash chunk_ids token_counts spans",
        erase={"document": "DELETE FROM manifests WHERE document_id = ANY(%(ids)s)"},
    ),
    Place(
        "document_events",
        free="document_id slot at kind outcome version observed_at seq lane",
        erase={"document": "DELETE FROM document_events WHERE document_id = ANY(%(ids)s)"},
    ),
    Place(
        "index_state",
        free=(
            "document_id generation store want_seq seq pending_since next_at settled_at claimed confirmed "
            "confirmed_hashes refused written attempts error settled_xid"
        ),
    ),
    Place(
        "access_sets",  # erased by erase_access_sets: only where no document uses them
        personal="acl_tags required_tags",
        free="id tenant digest",
        of_person="tenant = %(tenant)s AND EXISTS (SELECT FROM unnest(acl_tags || required_tags) tag"
        " WHERE right(tag, length(%(person)s) + 6) = '/user:' || %(person)s"
        " OR right(tag, length(%(person)s) + 5) = 'user:' || %(person)s)",
    ),
    Place(
        "dead_letter_trail",
        personal="by reason",
        free="id letter_id at action",
        erase={
            "document": "DELETE FROM dead_letter_trail WHERE letter_id IN"
            " (SELECT id FROM dead_letters WHERE document_id = ANY(%(ids)s))",
            "source": f"DELETE FROM dead_letter_trail WHERE letter_id IN (SELECT id FROM dead_letters {_OF_SOURCE})",
            "tenant": f"DELETE FROM dead_letter_trail WHERE letter_id IN (SELECT id FROM dead_letters {_OF_TENANT})",
            "person": "DELETE FROM dead_letter_trail WHERE letter_id IN (SELECT id FROM dead_letters"
            " WHERE tenant = %(tenant)s AND stage = 'identities' AND external_id = %(person)s)",
        },
    ),
    Place(
        "dead_letters",
        personal="external_id message dismissed_by dismissed_reason",
        free=(
            "id topic partition offset stage code document_id tenant source at letter_partition letter_offset "
            "value_bytes attempt first_failed_at replay_of replayed_at replayed_partition replayed_offset "
            "dismissed_at"
        ),
        erase={
            "document": "DELETE FROM dead_letters WHERE document_id = ANY(%(ids)s)",
            "source": f"DELETE FROM dead_letters {_OF_SOURCE}",
            "tenant": f"DELETE FROM dead_letters {_OF_TENANT}",
            "person": "DELETE FROM dead_letters WHERE tenant = %(tenant)s AND stage = 'identities'"
            " AND external_id = %(person)s",
        },
        of_person="tenant = %(tenant)s AND stage = 'identities' AND external_id = %(person)s",
        age=Age("dead_letters_days", _by_owner("dead_letters")),
    ),
    Place(
        "memberships",
        personal="principal groups",
        free="tenant source observed_at",
        erase={
            "source": f"DELETE FROM memberships {_OF_SOURCE}",
            "tenant": f"DELETE FROM memberships {_OF_TENANT}",
            "person": "DELETE FROM memberships WHERE tenant = %(tenant)s AND principal = %(person)s",
        },
        of_person="tenant = %(tenant)s AND principal = %(person)s",
        age=Age("memberships_days", _by_owner("memberships")),
    ),
    Place("membership_floors", free="tenant source observed_at"),
    Place("person_floors", free="tenant subject observed_at"),
    Place(
        "connector_items",
        personal="external_id scope stat revision acl_tags required_tags problem_message",
        free=(
            "tenant source version fingerprint problem_code swept_at content_at access_at gone in_doubt_since "
            "difference difference_at withdrawn_at unlisted_since"
        ),
        erase={
            "document": f"DELETE FROM connector_items {_NAMED}",
            "source": f"DELETE FROM connector_items {_OF_SOURCE}",
            "tenant": f"DELETE FROM connector_items {_OF_TENANT}",
        },
        of_person=_TAGGED,
        age=Age("deleted_days", _by_owner("connector_items")),
    ),
    Place(
        "connectors",  # what a withdrawal resets, once more for those that were removed without it
        personal="changes_cursor full_cursor groups_listing guard activities problems reconciliation",
        free=(
            "tenant source kind epoch paused full_state loaded_at counts worker address seen_at removed_at "
            "access_every_seconds"
        ),
        erase={
            "source": "UPDATE connectors SET changes_cursor = NULL, full_cursor = NULL, full_state = 'due',"
            " groups_listing = NULL, guard = NULL, activities = '{}', problems = '[]', reconciliation = NULL"
            f" {_OF_SOURCE}",
        },
    ),
    Place(
        "connector_asks",
        personal="argument outcome",
        free="id tenant source action asked_at done_at",
        erase={
            "document": f"DELETE FROM connector_asks WHERE {_SOURCE} AND argument = ANY(%(names)s)",
            "source": f"DELETE FROM connector_asks {_OF_SOURCE}",
            "tenant": f"DELETE FROM connector_asks {_OF_TENANT}",
        },
        age=Age("deleted_days", _by_owner("connector_asks")),
    ),
    Place(
        "connector_groups",
        personal="tag members of",
        free="tenant source observed_at",
        erase={
            "source": f"DELETE FROM connector_groups {_OF_SOURCE}",
            "tenant": f"DELETE FROM connector_groups {_OF_TENANT}",
            "person": "UPDATE connector_groups SET members = array_remove(members, %(person)s),"
            f" of = array_remove(of, 'user:' || %(person)s) WHERE {_HELD}",
        },
        of_person=_HELD,
    ),
    Place(
        "connector_principals",
        personal="principal",
        free="tenant source digest observed_at",
        erase={
            "source": f"DELETE FROM connector_principals {_OF_SOURCE}",
            "tenant": f"DELETE FROM connector_principals {_OF_TENANT}",
            "person": "DELETE FROM connector_principals WHERE tenant = %(tenant)s AND principal = %(person)s",
        },
        of_person="tenant = %(tenant)s AND principal = %(person)s",
    ),
    Place(
        "connector_memory",
        personal="name value",
        free="tenant source",
        erase={
            "source": f"DELETE FROM connector_memory {_OF_SOURCE}",
            "tenant": f"DELETE FROM connector_memory {_OF_TENANT}",
        },
    ),
    Place(
        "connector_differences",  # gone with the difference, or a day after it was repaired
        personal="name",
        free="tenant source subject published seen_at repaired_at",
        erase={
            "document": f"DELETE FROM connector_differences WHERE {_SOURCE} AND subject = 'document'"
            " AND name = ANY(%(names)s)",
            "source": f"DELETE FROM connector_differences {_OF_SOURCE}",
            "tenant": f"DELETE FROM connector_differences {_OF_TENANT}",
            "person": "DELETE FROM connector_differences WHERE tenant = %(tenant)s AND subject = 'principal'"
            " AND name = %(person)s",
        },
        of_person="tenant = %(tenant)s AND subject = 'principal' AND name = %(person)s",
    ),
    Place("connector_sources", free="tenant source observed_at"),
    Place(  # names passages by their chunks; ends when they do
        "conflicts",
        free="id tenant generation kind document_a document_b chunk_a chunk_b older places at",
    ),
    Place("conflict_decisions", free="conflict_id tenant state at"),
    Place("conflict_examined", free="document_id tenant generation chunk_ids access_id"),
    Place("connector_publications", free="tenant source document_id kind observed_at since version"),
    Place(
        "connector_freshness",
        free=(
            "tenant source epoch tracked_since equal_at every_seconds listed_at complete_until access_until "
            "groups_until has_gaps generation reopened_at"
        ),
    ),
    Place(
        "webhooks",
        free=(
            "name tenant sources answers conflicts url private salt salt_check old_salt old_salt_check old_until "
            "created_at paused_at reason failing_since failures next_at delivered delivered_at"
        ),
    ),
    Place(
        "webhook_deliveries",  # erased by age by the connectors worker. Receivers must learn what they have to drop
        personal="event",
        free=("id webhook tenant document_id state event_id created_at attempts failed_at due_at reason parked_at"),
        erase={
            "document": "DELETE FROM webhook_deliveries WHERE document_id = ANY(%(ids)s) AND (state <> 'retired'"
            " OR parked_at IS NOT NULL)",
            "tenant": f"DELETE FROM webhook_deliveries {_OF_TENANT} AND (state <> 'retired' OR parked_at IS NOT NULL)",
        },
    ),
    Place(
        "uploads",  # the file itself goes when the connectors' worker next looks for originals that nothing needs
        personal="external_id file_name title acl_tags required_tags metadata problem",
        free=(
            "id tenant source version media_type sha256 size received_at modified_at changed extracting_at "
            "extracted_at problem_code deleted_at"
        ),
        erase={
            "document": f"DELETE FROM uploads {_NAMED}",
            "source": f"DELETE FROM uploads {_OF_SOURCE}",
            "tenant": f"DELETE FROM uploads {_OF_TENANT}",
        },
        of_person=_TAGGED,
    ),
    Place(
        "conversation_mentions",
        personal="member conversation sent_id",
        free="tenant digest source asked_at observed_at answer_id",
        erase={
            "tenant": f"DELETE FROM conversation_mentions {_OF_TENANT}",
            "person": "DELETE FROM conversation_mentions WHERE tenant = %(tenant)s AND member = %(person)s",
        },
        of_person="tenant = %(tenant)s AND member = %(person)s",
    ),
    Place(
        "conversation_pairs",
        personal="member question answer",
        free="tenant digest asked_at tokens",
        erase={
            "tenant": f"DELETE FROM conversation_pairs {_OF_TENANT}",
            "person": "DELETE FROM conversation_pairs WHERE tenant = %(tenant)s AND member = %(person)s",
        },
        of_person="tenant = %(tenant)s AND member = %(person)s",
    ),
    Place(
        "conversation_chunks",
        personal="member text embedding",
        free="tenant digest position first_at last_at tokens made_by attempts next_at",
        erase={
            "tenant": f"DELETE FROM conversation_chunks {_OF_TENANT}",
            "person": "DELETE FROM conversation_chunks WHERE tenant = %(tenant)s AND member = %(person)s",
        },
        of_person="tenant = %(tenant)s AND member = %(person)s",
    ),
    Place(
        "conversation_members",
        personal="member",
        free="tenant tokens is_chunked chunked_at",
        erase={
            "tenant": f"DELETE FROM conversation_members {_OF_TENANT}",
            "person": "DELETE FROM conversation_members WHERE tenant = %(tenant)s AND member = %(person)s",
        },
        of_person="tenant = %(tenant)s AND member = %(person)s",
    ),
    Place("conversation_floors", free="tenant subject forgotten_at"),
    Place("conversation_provenance", free="tenant answer_id documents"),
    Place("answer_provenance", free="tenant answer_id documents made_at"),
    Place(
        "standing_questions",
        personal="principal question request sentences probe words names anchors",
        free="tenant id model generation stored_at asked_at probe_generation is_full words_floor",
        erase={
            "document": "UPDATE standing_questions q SET sentences = '[]' WHERE q.tenant = %(tenant)s"
            " AND sentences <> '[]' AND EXISTS (SELECT FROM standing_passages p WHERE p.tenant = q.tenant"
            " AND p.question_id = q.id AND p.document_id = ANY(%(ids)s::uuid[]))",
            "tenant": f"DELETE FROM standing_questions {_OF_TENANT}",
            "person": "DELETE FROM standing_questions WHERE tenant = %(tenant)s AND principal = %(person)s",
        },
        of_person="tenant = %(tenant)s AND principal = %(person)s",
        left_out="probe",
        age=Age("standing_days", _by_owner("standing_questions")),
    ),
    Place("standing_changes", free="tenant question_id kind chunk_id document_id asked_at noticed_at"),
    Place("standing_passages", free="tenant question_id n chunk_id document_id content_hash"),
    Place(
        "answer_reviews",
        personal="question answer unsupported",
        free=("answer_id tenant asked_at mode model support density reasons documents chunks resolved_at resolved_as"),
        erase={
            "document": "DELETE FROM answer_reviews WHERE tenant = %(tenant)s AND documents && %(ids)s::uuid[]",
            "tenant": f"DELETE FROM answer_reviews {_OF_TENANT}",
            "person": "DELETE FROM answer_reviews WHERE tenant = %(tenant)s AND answer_id = ANY(%(answers)s::uuid[])",
        },
        of_person="tenant = %(tenant)s AND answer_id = ANY(%(answers)s::uuid[])",
        age=Age("reviews_days", _by_owner("answer_reviews")),
    ),
    Place(
        "answer_feedback",
        personal="giver query note",
        free="tenant subject answer_id chunk_id verdict given_at",
        erase={
            "document": "DELETE FROM answer_feedback WHERE tenant = %(tenant)s"
            " AND (answer_id = ANY(%(answers)s::uuid[]) OR chunk_id = ANY(%(chunks)s::uuid[]))",
            "tenant": f"DELETE FROM answer_feedback {_OF_TENANT}",
            "person": "DELETE FROM answer_feedback WHERE tenant = %(tenant)s"
            " AND (giver = ANY(%(givers)s::bytea[]) OR answer_id = ANY(%(answers)s::uuid[]))",
        },
        of_person="tenant = %(tenant)s AND (giver = ANY(%(givers)s::bytea[]) OR answer_id = ANY(%(answers)s::uuid[]))",
        age=Age("feedback_days", _by_owner("answer_feedback")),
    ),
    Place(
        "eval_queries",  # their judgements go with them
        personal="text principals tags reference givers",
        free="id tenant added_at baseline answers documents",
        erase={
            "document": "DELETE FROM eval_queries WHERE tenant = %(tenant)s AND (documents && %(ids)s::uuid[] OR id IN"
            " (SELECT query_id FROM eval_judgements WHERE source = %(source)s AND external_id = ANY(%(names)s)))",
            "source": "DELETE FROM eval_queries WHERE tenant = %(tenant)s AND id IN"
            " (SELECT query_id FROM eval_judgements WHERE source = %(source)s)",
            "tenant": f"DELETE FROM eval_queries {_OF_TENANT}",
            "person": f"DELETE FROM eval_queries WHERE {_QUESTIONS_AS}",
        },
        of_person=_QUESTIONS_AS,
        age=Age("golden_days", _by_owner("eval_queries")),
    ),
    Place(
        "eval_judgements",  # with its question, if that was promoted from what a document said that is deleted
        personal="external_id anchor",
        free="query_id source gain",
        age=Age("deleted_days", _by_owner("eval_judgements")),
    ),
    Place("eval_runs", free="id started_at generation slice measure value queries change p paired accepted"),
    Place("shadow_agreement", free="active candidate hour queries overlap agreement failed"),
    Place(
        "audit_runs",
        free="id generation scope since started_at finished_at position next_at documents chunks pending",
    ),
    Place("audit_documents", free="run_id document_id"),
    Place(
        "audit_differences",
        personal="external_id",
        free="run_id document_id store kind chunks repaired",
        erase={"document": "DELETE FROM audit_differences WHERE document_id = ANY(%(ids)s)"},
    ),
    Place("open_bulks", free="id keyword_index documents chunks seqs unanswered sent_at next_at"),
    Place(
        "kafka_marks",
        free="consumer_group topic partition log_id offsets sent_ms digests marked_at owner",
    ),
    Place("handled", free="stage until"),
    Place(
        "generations",
        free=(
            "name state model revision dimensions input_window params document_prefix query_prefix "
            "chunk_table keyword_index vector_type reference created_at cleared_at service since calibration everyday "
            "vectors quantisation sketched centred centre"
        ),
    ),
    Place(
        "builds",
        free="generation origin replaces position filled filled_at created_at tokens ready_at",
    ),
    Place(
        "keyword_indexes",
        free="keyword_index index_uuid shards changes change changed_at position compared_at",
    ),
    Place("metadata_keys", free="tenant name type declared_at"),
    Place("fence", free="only_row system_identifier timeline state accepted_at"),
    Place("tenant_readers", free="reader tenant created_at"),
    Place("connector_logins", free="login tenant created_at"),
    Place("producers", free="name allow valid_from valid_until created_at"),
    Place("producer_keys", free="key_id producer public_key valid_from valid_until created_at"),
    Place(
        "query_use",
        personal="caller",
        free="tenant span since requests tokens money settled holders held",
        erase={
            "tenant": f"DELETE FROM query_use {_OF_TENANT}",
            "person": f"DELETE FROM query_use WHERE {_CALLS}",
        },
        of_person=_CALLS,
        age=Age("budgets_days", "SELECT FROM erase_use_by_age(%(days)s, %(most)s)"),
    ),
    Place("embedding_days", free="day purpose tokens cost"),
    Place("sketch_rotations", free="bits signs orders mixers"),
    Place("schema_migrations", free="name applied_at needs"),
    Place(
        "trail.records",  # kept whole until its age: receipts of `forget` name it (docs/adr/0052-audit-trail.md)
        personal="actor access object address",
        free="day chain number at tenant credential action documents decision reason request process key_id mac",
        of_person="tenant = %(tenant)s AND (actor = %(person)s OR access @> ARRAY['user:' || %(person)s::text]"
        " OR object <> '' AND object = ANY(%(concerned)s::text[]) OR EXISTS (SELECT FROM unnest(access) tag"
        " WHERE tag = 'tag:user:' || %(person)s"
        " OR starts_with(tag, 'tag:') AND right(tag, length(%(person)s) + 6) = '/user:' || %(person)s))",
        age=Age("trail_days", "SELECT FROM trail.expire(%(days)s, %(most)s)"),
    ),
    Place("trail.heads", free="number at day chain count digest key_id mac"),
)
CHUNKS = Place("chunks_*", personal="text embedding sketch", free="id document_id tenant access_id created_at in_graph")


async def raise_floor(connection: Connection, tenant: str, name: str, of: Literal["source", "person"]) -> datetime:
    """Have the stage identities ignore every membership of a source, or of a person in all sources of the tenant, that
    was observed until now. To be committed before the rows that say so themselves are erased. Returns the moment, after
    which the clocks of the sources have to go on; it is no later than what the stage accepts at all, whatever a
    connector has written of its clock."""
    floors, key, holds = {
        "source": ("membership_floors", "source", "source = %(source)s"),
        "person": ("person_floors", "subject", "principal = %(person)s"),
    }[of]
    cursor = await connection.execute(
        f"INSERT INTO {floors} AS f (tenant, {key}, observed_at) SELECT %(tenant)s, %({key})s,"
        " least(clock_timestamp() + %(ahead)s, greatest(clock_timestamp(), (SELECT max(observed_at) FROM memberships"
        f" WHERE tenant = %(tenant)s AND {holds}), (SELECT observed_at FROM connector_sources"
        f" WHERE tenant = %(tenant)s AND source = %(source)s))) ON CONFLICT (tenant, {key}) DO UPDATE SET"
        " observed_at = greatest(f.observed_at, EXCLUDED.observed_at) RETURNING observed_at",
        {
            "tenant": tenant,
            "source": name if of == "source" else None,
            "person": name,
            "subject": subject_digest(name),
            "ahead": MAX_AHEAD,
        },
    )
    [(floor,)] = await cursor.fetchall()
    return cast(datetime, floor)


async def raise_tenant_floor(connection: Connection, tenant: str) -> None:
    """Have nothing stored of the answers that are being written for anybody of this tenant. To be committed before the
    rows of the tenant are erased."""
    await connection.execute(
        "INSERT INTO person_floors AS f (tenant, subject, observed_at) VALUES (%s, %s, clock_timestamp())"
        " ON CONFLICT (tenant, subject) DO UPDATE SET observed_at = greatest(f.observed_at, EXCLUDED.observed_at)",
        [tenant, WHOLE_TENANT],
    )


async def erase(
    connection: Connection, subject: Subject, scope: Scope, *, only: Collection[str] | None = None
) -> dict[str, int]:
    """Erase everything in this scope except access sets, in the caller's transaction. Returns the number of rows erased
    by table; a table without any is absent. only: tables to erase from; None: all."""
    counts: dict[str, int] = {}
    parameters = scope.parameters()
    for place in PLACES:
        if (only is None or place.table in only) and (statement := place.erase.get(subject)) is not None:
            done = await connection.execute(statement, parameters)
            if done.rowcount > 0:
                counts[place.table] = done.rowcount
    if subject == "document":
        tables = await (await connection.execute("SELECT DISTINCT chunk_table FROM generations")).fetchall()
        for (table,) in tables:
            known = await (await connection.execute("SELECT to_regclass(quote_ident(%s))", [table])).fetchone()
            if known and known[0] is not None:
                done = await connection.execute(
                    sql.SQL("DELETE FROM {} WHERE document_id = ANY(%(ids)s)").format(sql.Identifier(table)), parameters
                )
                if done.rowcount > 0:
                    counts[table] = done.rowcount
    return counts


async def lock_deleted(connection: Connection, ids: Sequence[UUID]) -> list[UUID]:
    """Lock those of these documents that are deleted, removed from both stores, and announced as retired; they stay so
    until the caller's transaction ends. Returns their ids."""
    cursor = await connection.execute(
        "SELECT id FROM documents d WHERE id = ANY(%s) AND (deleted_at IS NOT NULL OR version IS NULL)"
        " AND announced_seq >= seq AND NOT EXISTS (SELECT FROM index_state s WHERE s.document_id = d.id"
        " AND s.seq < s.want_seq AND s.generation IN (SELECT name FROM generations WHERE state <> 'retired'))"
        " ORDER BY id FOR UPDATE",
        [list(ids)],
    )
    return [id_ for (id_,) in await cursor.fetchall()]


async def erase_access_sets(connection: Connection, tenant: str, ids: Sequence[int]) -> int:
    """Erase those of these access sets that no document uses, SETS_AT_ONCE in each transaction; returns their number.
    Workers that accept events wait for each transaction, because a set must not be deleted between its look-up and its
    use. Raises LockNotAvailable when the table stays locked."""
    count = 0
    for start in range(0, len(ids), SETS_AT_ONCE):
        for attempt in range(1, LOCK_ATTEMPTS + 1):
            try:
                count += await _erase_sets(connection, tenant, ids[start : start + SETS_AT_ONCE])
                break
            except LockNotAvailable:
                if attempt == LOCK_ATTEMPTS:
                    raise
                await asyncio.sleep(LOCK_PAUSE_SECONDS)
    return count


async def erase_unused_access_sets(connection: Connection, after: int, most: int) -> tuple[int, int]:
    """Look at the next ``most`` access sets after this id, and erase up to SETS_AT_ONCE that nothing uses, in the
    caller's transaction. Returns the id to continue after (0: from the beginning) and the number of erased sets. Raises
    LockNotAvailable, after which the caller's transaction may go on."""
    cursor = await connection.execute(
        "SELECT a.id, a.tenant, EXISTS (SELECT FROM documents d WHERE d.tenant = a.tenant AND d.access_id = a.id)"
        " FROM access_sets a WHERE a.id > %s ORDER BY a.id LIMIT %s",
        [after, most],
    )
    rows = await cursor.fetchall()
    unused = [(id_, tenant) for id_, tenant, is_used in rows if not is_used]
    batch = unused[:SETS_AT_ONCE]
    in_chunks = await _in_pending_chunks(connection, [id_ for id_, _ in batch])
    ids_by_tenant: dict[str, list[int]] = {}
    for id_, tenant in batch:
        if id_ not in in_chunks:
            ids_by_tenant.setdefault(tenant, []).append(id_)
    count = 0
    for tenant, ids in ids_by_tenant.items():
        count += await _erase_sets(connection, tenant, ids)
    if len(unused) > SETS_AT_ONCE:
        return batch[-1][0], count
    return rows[-1][0] if len(rows) == most else 0, count


async def _in_pending_chunks(connection: Connection, access_ids: Sequence[int]) -> set[int]:
    """Those of these access sets that chunks of documents still have which the vectors stage has yet to follow: a
    search looks for the sets in the chunks, and would miss these documents without them. All of them while more than
    PENDING_AT_ONCE rows of the stores' states are pending."""
    if not access_ids:
        return set()
    cursor = await connection.execute(
        "SELECT g.chunk_table, count(*), array_agg(s.document_id) FILTER (WHERE s.store = 'vectors')"
        " FROM (SELECT document_id, generation, store FROM index_state WHERE seq < want_seq LIMIT %s) s"
        " JOIN generations g ON g.name = s.generation WHERE g.state <> 'retired' GROUP BY g.chunk_table",
        [PENDING_AT_ONCE + 1],
    )
    pending = await cursor.fetchall()
    if sum(count for _, count, _ in pending) > PENDING_AT_ONCE:
        return set(access_ids)
    in_chunks: set[int] = set()
    for table, _, documents in pending:
        cursor = await connection.execute(
            sql.SQL("SELECT DISTINCT access_id FROM {} WHERE document_id = ANY(%s) AND access_id = ANY(%s)").format(
                sql.Identifier(table)
            ),
            [documents or [], list(access_ids)],
        )
        in_chunks.update(id_ for (id_,) in await cursor.fetchall())
    return in_chunks


async def erase_rest_of_documents(connection: Connection, after: UUID, most: int) -> tuple[UUID, int]:
    """Look at the next ``most`` erased documents after this id, and erase their events and the standing answers that
    were made from them: versions before migration 0094 left these. Returns the id to continue after (zero: from the
    beginning) and the number of erased events."""
    cursor = await connection.execute(
        "SELECT id FROM documents WHERE id > %s AND erased_at IS NOT NULL ORDER BY id LIMIT %s", [after, most]
    )
    ids = [id_ for (id_,) in await cursor.fetchall()]
    if not ids:
        return UUID(int=0), 0
    await connection.execute("SELECT erase_standing_answers(%s)", [ids])
    done = await connection.execute(
        "DELETE FROM document_events WHERE document_id IN (SELECT id FROM documents d WHERE id = ANY(%s)"
        " AND erased_at IS NOT NULL AND EXISTS (SELECT FROM document_events e WHERE e.document_id = d.id)"
        " FOR UPDATE SKIP LOCKED)",  # one that is published anew has events of its own
        [ids],
    )
    return ids[-1] if len(ids) == most else UUID(int=0), done.rowcount


async def _erase_sets(connection: Connection, tenant: str, ids: Sequence[int]) -> int:
    async with connection.transaction():
        await connection.execute(
            "SET LOCAL lock_timeout = '200ms'"
        )  # a statement that waits for a lock blocks all behind it
        await connection.execute("LOCK TABLE access_sets IN SHARE ROW EXCLUSIVE MODE")
        done = await connection.execute(
            "DELETE FROM access_sets a WHERE a.id = ANY(%(ids)s) AND a.tenant = %(tenant)s AND NOT EXISTS"
            " (SELECT FROM documents d WHERE d.tenant = a.tenant AND d.access_id = a.id)",
            {"tenant": tenant, "ids": list(ids)},
        )
        return done.rowcount


async def export(connection: Connection, scope: Scope) -> dict[str, list[dict[str, Any]]]:
    """All rows that are stored about a person, by table, without embeddings, and without the texts of documents whose
    metadata name the person."""
    rows_by_table: dict[str, list[dict[str, Any]]] = {}
    for place in PLACES:
        if place.of_person is None:
            continue
        left_out = f"- '{place.left_out}'" if place.left_out in place.personal.split() else ""
        async with connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(
                f"SELECT to_jsonb(one) {left_out} AS row FROM {place.table} one WHERE {place.of_person}",
                scope.parameters(),
            )
            if rows := [row["row"] for row in await cursor.fetchall()]:
                rows_by_table[place.table] = rows
    return rows_by_table
