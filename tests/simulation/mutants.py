# ruff: noqa: E501  (the table of mutants)
"""``make mutants``: deliberate defects of the protocol, each played against the simulation until a history fails, and
what survives that against the tests that are named for it (SIMULATE_HISTORIES, SIMULATE_PROCESSES; MUTANTS_KEPT is a
file that lets a run go on where another one was cut off).

A mutant is a textual change of one module, made while it is imported in a process of its own; no file is changed. An
anchor that is no longer in the module fails a test, so that the table does not rot.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "mutants.md"
HISTORIES = int(os.environ.get("SIMULATE_HISTORIES", "1000"))
"""Played against a mutant before it counts as survived: some twenty-five seconds of one processor."""
HISTORIES_BESIDE_TESTS = 30
"""The number of histories for a mutant that names tests: the tests detect at once what the simulation does not detect
soon. Mutants of connectors are played to the end all the same, since their histories should detect them without
help."""
PRELOADED = ("pytest", "hypothesis", "elasticsearch", "psycopg", "numpy", "aiokafka", "pydantic", "structlog")
"""Packages of others that every process begins with: importing them takes longer than many a mutant lives."""


class Mutant(NamedTuple):
    """One defect: in ``module`` the text ``anchor`` becomes ``defect``."""

    name: str
    module: str
    anchor: str
    defect: str
    tests: tuple[str, ...] = ()
    """The tests that detect it where the simulation does not: most mutants only remove a safeguard that has a second
    one, or change SQL or a module that the simulation does not run. Files of tests, with ``::name`` for one of them."""

    @property
    def contracts(self) -> list[str]:
        """Those of the tests that need services."""
        return [test for test in self.tests if "/contract/" in test]


_FOLD, _FOLDING, _DETECT = "pipeline.core.fold", "pipeline.stages.folding", "pipeline.stages.detect"
_DOCUMENTS, _WORK, _BULKS = "pipeline.ledger.documents", "pipeline.ledger.work", "pipeline.ledger.bulks"
_KEYWORDS, _VECTORS, _LATE = "pipeline.stages.keywords", "pipeline.stages.vectors", "pipeline.stages.keywords"
_STORE, _DIFF, _PROGRESS = "pipeline.stores.keywords", "pipeline.core.diff", "pipeline.core.progress"
_SWEEP, _ANNOUNCE, _RECOVER = "pipeline.stages.hints", "pipeline.stages.announce", "pipeline.maintenance.recover"
_ATTEMPTS, _SUPERSEDED, _ACCESS = "pipeline.stream.attempts", "pipeline.ledger.documents", "query.access.callers"
_IDENTITIES, _VERIFY, _RETRIEVAL = "pipeline.stages.identities", "query.access.verify", "query.retrieval.search"
_COMPARE, _PUBLISH, _ROWS = "connectors.runner.compare", "connectors.runner.publish", "connectors.runner.rows"
_MEMBERSHIP, _GROUPS = "connectors.runner.membership", "connectors.runner.identities"
_ADMISSION, _GUARD, _CONSUME = "pipeline.stages.admission", "pipeline.stream.logguard", "pipeline.stream.consume"
_FRESHNESS, _COMPLETE = "connectors.runner.freshness", "tests/contract/connectors/runner/test_freshness.py"
_CRAWL, _LISTING = "connectors.runner.crawl", "connectors.runner.sweep"

_SAFEGUARDS, _PUBLISHING = (
    "tests/unit/pipeline/stages/test_safeguards.py",
    "tests/unit/connectors/runner/test_publish.py",
)
_COMPARING, _ORDERING = "tests/unit/connectors/runner/test_compare.py", "tests/unit/pipeline/stages/test_order.py"
_FOLDED, _SEARCH = "tests/unit/pipeline/core/test_fold.py", "tests/contract/query/test_search.py"
_READING, _CONSUMING = "tests/unit/connectors/runner/test_reading.py", "tests/unit/pipeline/stream/test_consume.py"
_DOUBT, _AGAIN = "tests/contract/connectors/runner/test_in_doubt.py", "tests/contract/query/test_retrieval.py"

MUTANTS: tuple[Mutant, ...] = (
    # What an event does to a document
    Mutant("content is not ordered by version", _FOLD, "return True if theirs > mine", "return True if True"),
    Mutant(
        "content is ordered by version alone",
        _FOLD,
        "return True if theirs > mine",
        "return True if event.version >= (state.version or 0)",
    ),
    Mutant(
        "an upsert from before a delete is taken",
        _FOLD,
        "event.observed_at <= state.deleted_floor",
        "False",
        (_FOLDED + "::test_a_delete_wins_over_a_higher_version_observed_before_it",),
    ),
    Mutant(
        "a delete loses to an upsert of its very moment",
        _FOLD,
        "event.observed_at <= state.deleted_floor",
        "event.observed_at < state.deleted_floor",
        (_FOLDED + "::test_a_delete_with_the_same_version_and_observation_time_as_an_upsert_wins",),
    ),
    Mutant("of two access changes the later arrival wins", _FOLD, "event.observed_at < known", "False"),
    Mutant(
        "at a tie the wider access wins",
        _FOLD,
        "set(state.acl_tags) & set(",
        "set(state.acl_tags) | set(",
        (_FOLDED + "::test_at_equal_observation_times_the_narrower_access_wins_in_either_order",),
    ),
    Mutant(
        "at a tie required tags are dropped",
        _FOLD,
        "set(state.required_tags) | set(",
        "set(state.required_tags) & set(",
        (_FOLDED, _ORDERING),
    ),
    Mutant(
        "a delete from before the content ends it",
        _FOLD,
        "state.observed_at > event.observed_at:",
        "False:",
        (_FOLDED + "::test_a_delete_observed_before_the_upsert_does_not_remove_the_document",),
    ),
    Mutant(
        "a delete keeps the older floor",
        _FOLD,
        "max(state.deleted_floor",
        "min(state.deleted_floor",
        (_FOLDED + "::test_of_two_deletes_the_later_observed_one_sets_the_floor_in_either_order",),
    ),
    Mutant(
        "access that came before the document is forgotten",
        _FOLD,
        'return Step(after, "stub")',
        'return Step(state, "stub")',
        (_FOLDED, _ORDERING),
    ),
    Mutant(
        "a stale upsert brings no access",
        _FOLD,
        'return Step(after, "access", access)\n        return Step(after, newer)',
        "return Step(state, newer)\n        return Step(state, newer)",
        (_FOLDED, _ORDERING),
    ),
    Mutant(
        "new metadata counts as unchanged",
        _FOLD,
        "if state.meta_hash != event.meta_hash:\n        return",
        "if False:\n        return",
    ),
    Mutant("a new title is not written", _FOLDING, "meta_changed or text_changed", "text_changed"),
    Mutant(
        "what a version superseded is forgotten", _FOLDING, "document.superseded.append(arrival)", "pass", (_ORDERING,)
    ),
    Mutant(
        "what stood before a restored old file is forgotten",
        _FOLDING,
        "document.stored_content_superseded = True",
        "pass",
        (_ORDERING,),
    ),
    Mutant(
        "what a delete brings back stays away",
        _FOLDING,
        "_revive(document, candidate)",
        "pass",
        (_ORDERING,),
    ),
    Mutant(
        "of a batch only the last event of a document counts",
        _FOLDING,
        "        _apply(document, arrival)\n",
        "        document.state = document.before.state\n        _apply(document, arrival)\n",
    ),
    Mutant(
        "the text of a deleted document stays", _FOLDING, "erased=not state.alive and bool(changes)", "erased=False"
    ),
    Mutant(
        "one superseded version is kept",
        _SUPERSEDED,
        "MAX_SUPERSEDED = 8",
        "MAX_SUPERSEDED = 1",
        (
            "tests/contract/pipeline/stages/test_event_order.py::test_a_document_observed_after_a_late_delete_is_not_lost",
        ),
    ),
    Mutant(
        "the eight highest superseded versions are kept",
        _SUPERSEDED,
        "(PARTITION BY document_id ORDER BY observed_at DESC)",
        "(PARTITION BY document_id ORDER BY version DESC)",
        (
            "tests/contract/pipeline/stages/test_event_order.py::test_a_document_observed_after_a_late_delete_is_not_lost",
        ),
    ),
    # detect
    Mutant(
        "what was read before the lock decides",
        _DETECT,
        "known = await documents.lock(connection, identities)",
        "await documents.lock(connection, identities)",
        (_SAFEGUARDS,),
    ),
    Mutant(
        "a manifest foreseen from another text is taken",
        _DETECT,
        "before is not None and before.source == source",
        "before is not None",
        (_SAFEGUARDS,),
    ),
    Mutant("no hints are sent", _DETECT, "if document.draws_seq or document.before.pending", "if False"),
    Mutant(
        "a repeated event hints nothing",
        _DETECT,
        "if document.draws_seq or document.before.pending",
        "if document.draws_seq",
        (_SAFEGUARDS,),
    ),
    Mutant(
        "a record that nobody can read is dropped",
        _ADMISSION,
        "sorted_batch.poison.append((record, without_traceback(error)))",
        "pass",
    ),
    Mutant(
        "a record that nobody can read hides the others of its batch",
        _DETECT,
        "            if arrivals or urgent:\n",
        "            if (arrivals or urgent) and not poison:\n",
    ),
    Mutant(
        "a withdrawal is not announced at once",
        _DETECT,
        "[self._unannounced[i] for i in ids if i in self._unannounced]",
        "[]",
        (_SAFEGUARDS,),
    ),
    Mutant("erased texts keep their manifests", _DOCUMENTS, "if a.erased]", "if False]"),
    Mutant("only one store wants the change", _DOCUMENTS, "for store in STORES\n", "for store in STORES[:1]\n"),
    Mutant(
        "a sequence number is drawn below the document's",
        _DOCUMENTS,
        "max(drawn, before.seq + 1)",
        "drawn",
        (_SAFEGUARDS,),
    ),
    Mutant(
        "of a batch only the last membership counts",
        _IDENTITIES,
        "await self._accept(rows)",
        "await self._accept(rows[-1:])",
    ),
    # The ledger and both sinks
    Mutant("a claim skips the check of want_seq", _WORK, "if wants.get(id_) == want_seq]", "]", (_SAFEGUARDS,)),
    Mutant("bodies of another text are used", _WORK, "digest == hashes[id_] and ", "", (_SAFEGUARDS,)),
    Mutant(
        "nothing is claimed",
        _KEYWORDS,
        "p.work.want_seq, p.touched) for p in plans]\n                )",
        "p.work.want_seq, ()) for p in plans]\n                )",
    ),
    Mutant(
        "keywords confirms what was overtaken",
        _KEYWORDS,
        "still = [p for i, p in by_id.items() if wants.get(i) == p.work.want_seq]",
        "still = list(by_id.values())",
        (_SAFEGUARDS,),
    ),
    Mutant("what was overtaken is not reopened", _KEYWORDS, "for p in moved],", "for p in moved[:0]],", (_SAFEGUARDS,)),
    Mutant(
        "keywords never catches up with the index",
        _KEYWORDS,
        "reached = [p for p in still if p.work.identity.id not in again]",
        "reached = still",
        (_SAFEGUARDS,),
    ),
    Mutant("a bulk is not recorded with its claim", _KEYWORDS, "if entries else None", "if False else None"),
    Mutant(
        "a bulk counts as answered though an earlier try was not",
        _KEYWORDS,
        "None if any(o.unsure for o in outcomes.values()) else claimed.bulk",
        "claimed.bulk",
        (_SAFEGUARDS,),
    ),
    Mutant("a bulk is sent however old its claim is", _STORE, "patience.require_time()", "pass", (_SAFEGUARDS,)),
    Mutant("late bulks are never checked", _LATE, "removed += await self._check_one(bulk)", "pass"),
    Mutant(
        "an open bulk is forgotten at its first check",
        _LATE,
        "if bulk.expired and unwanted.complete",
        "if unwanted.complete",
    ),
    Mutant(
        "deletes are repeated after their tombstones are forgotten",
        _LATE,
        "CHECK_SECONDS = 240.0",
        "CHECK_SECONDS = 2_400.0",
        (_SAFEGUARDS,),
    ),
    Mutant(
        "tombstones are remembered for a minute",
        "pipeline.stores.elasticsearch",
        'GC_DELETES = "10m"',
        'GC_DELETES = "60s"',
        (_SAFEGUARDS,),
    ),
    Mutant(
        "a repeated delete has the bulk's own version",
        _BULKS,
        "max(entry.seq, wants.get(entry.document, 0))",
        "entry.seq",
        (_SAFEGUARDS,),
    ),
    Mutant(
        "what a check deletes stays confirmed",
        _LATE,
        "for entry in unwanted.confirmed]",
        "for entry in unwanted.confirmed[:0]]",
        (_SAFEGUARDS,),
    ),
    Mutant(
        "an answer is certain however old its claim is",
        _BULKS,
        "ANSWERED_SECONDS = 300.0",
        "ANSWERED_SECONDS = 86_400.0",
        (_SAFEGUARDS,),
    ),
    Mutant("what is wanted of a late bulk is deleted too", _BULKS, "if entry.chunk not in desired and", "if True and"),
    Mutant(
        "what nobody can judge of a late bulk is deleted",
        _BULKS,
        " and entry.document not in unknown",
        "",
        (_SAFEGUARDS,),
    ),
    Mutant(
        "an entry is deleted only if it was confirmed",
        _DIFF,
        "(set(claimed) | set(confirmed)) - set(desired)",
        "set(confirmed) - set(desired)",
    ),
    Mutant(
        "a confirmed entry is not compared by its hash", _DIFF, "confirmed.get(i) != entry_hash", "i not in confirmed"
    ),
    Mutant(
        "the keyword hash leaves out access",
        "pipeline.ledger.entry",
        '"acl_tags": list(w.acl_tags),',
        '"acl_tags": [],',
    ),
    Mutant(
        "a write of an equal version is refused",
        _STORE,
        '"version_type": "external_gte"',
        '"version_type": "external"',
        (_SAFEGUARDS,),
    ),
    Mutant(
        "vectors writes what was overtaken",
        _VECTORS,
        "still = [p for p in plans if wants.get(p.work.identity.id) == p.work.want_seq]",
        "still = list(plans)",
        (_SAFEGUARDS,),
    ),
    Mutant("vectors leaves what nobody wants", _VECTORS, "[i for p in still for i in p.gone]", "[]"),
    Mutant(
        "access is not restamped", _VECTORS, "{p.work.identity.id: p.work.access_id for p in still if p.had_rows}", "{}"
    ),
    Mutant(
        "vectors settles before every row is written",
        _VECTORS,
        "if not unstamped and written | refused",
        "if written | refused",
    ),
    Mutant("a chunk gets another one's vector", _VECTORS, "n = index[chunks[id_]]", "n = 0"),
    Mutant(
        "chunks that cannot be embedded are not recorded",
        _VECTORS,
        "all_refused = sorted({*w.refused, *refused} & set(w.chunk_ids))",
        "all_refused = list[UUID]()",
    ),
    Mutant(
        "texts that have vectors are embedded again",
        _VECTORS,
        "for id_, chunk in chunks.items() if chunk not in known}",
        "for id_, chunk in chunks.items()}",
    ),
    Mutant(
        "a sink cuts under a text that has moved",
        "pipeline.stages.manifests",
        "if row is not None and (row[0]",
        "if True or (row[0]",
        (_SAFEGUARDS,),
    ),
    # The stream
    Mutant(
        "offsets are committed over gaps",
        _PROGRESS,
        "self._last[partition] = grown[-1]",
        "self._last[partition] = token",
    ),
    Mutant(
        "an offset is committed before the record is done",
        _PROGRESS,
        "token = Token(offset, stamp)",
        "token = Token(offset, stamp, True)",
        ("tests/unit/pipeline/core/test_progress.py::test_no_offset_is_committed_past_a_record_in_flight",),
    ),
    Mutant(
        "a failing batch is acknowledged",
        _ATTEMPTS,
        'return "again"\n        except Exception',
        'return "done"\n        except Exception',
    ),
    Mutant(
        "half of a split batch is lost",
        _ATTEMPTS,
        "(self.items[:middle], self.items[middle:])",
        "(self.items[:middle], self.items[:middle])",
        ("tests/unit/pipeline/stream/test_lanes.py", "tests/unit/pipeline/stream/test_attempts.py"),
    ),
    Mutant(
        "a record that always fails is dropped",
        _ATTEMPTS,
        "await self._stage.set_aside(batch.items[0][0], error)",
        "pass",
        ("tests/unit/pipeline/stream/test_attempts.py",),
    ),
    Mutant("the sweeper hints nothing", _SWEEP, "if not due:", "if True:", (_SAFEGUARDS,)),
    Mutant(
        "announcements that a crash cut off are not made up for",
        _SWEEP,
        "if round_ % ANNOUNCE_EVERY == 0:",
        "if False:",
        (_SAFEGUARDS,),
    ),
    Mutant("nothing is announced", _ANNOUNCE, "if not ready:\n            return 0", "if ready:\n            return 0"),
    Mutant(
        "an announcement is recorded before it is sent",
        _ANNOUNCE,
        "        now = datetime.now(UTC)\n        announced = [",
        "        async with self._pool.connection() as connection:\n            await ledger.mark_announced(connection, ready)\n        now = datetime.now(UTC)\n        announced = [",
    ),
    Mutant(
        "a log that moved counts as the same", _GUARD, 'if verdict.kind == "same" and not state.stopped:', "if True:"
    ),
    Mutant(
        "a log that moved is read on from its end",
        "pipeline.core.kafka_log",
        "read_from = max(same) + 1 if same else log.begin",
        "read_from = log.end",
    ),
    Mutant(
        "an offset is committed whose mark is not stored",
        _CONSUME,
        "for tp, offset in offsets.items() if tp in marked}",
        "for tp, offset in offsets.items()}",
        (_CONSUMING + "::test_only_offsets_whose_marks_are_stored_are_committed",),
    ),
    Mutant(
        "a commit that was under way undoes an offset that was taken back",
        _CONSUME,
        "for tp, offset in offsets.items() if progress.last(tp) is not None}",
        "for tp, offset in offsets.items()}",
        (_CONSUMING + "::test_a_commit_that_began_before_an_offset_was_taken_back_does_not_undo_it",),
    ),
    Mutant(
        "a worker that lost a partition replaces the mark of its next owner",
        "pipeline.ledger.kafka_marks",
        " WHERE m.owner <= excluded.owner",
        "",
        (
            "tests/contract/pipeline/kafka/test_logs.py::test_a_worker_that_lost_its_partition_does_not_overwrite_the_next_owners_mark",
        ),
    ),
    Mutant(
        "lag counts what the log no longer has",
        "pipeline.kafka.groups",
        "max(self.begin, committed or 0)",
        "(committed or 0)",
        ("tests/unit/pipeline/kafka/test_offsets.py",),
    ),
    Mutant(
        "a lag may be below nothing",
        "pipeline.kafka.groups",
        "return max(0, self.end -",
        "return (self.end -",
        ("tests/unit/pipeline/kafka/test_offsets.py",),
    ),
    # recover and the audit
    Mutant("recover replays nothing", _RECOVER, "return {p: log.since for p", "return {p: log.end for p"),
    Mutant(
        "recover leaves the sequence where it was",
        _RECOVER,
        "after = max(before, drawn, highest)",
        "after = before",
        (
            "tests/contract/pipeline/maintenance/test_recover.py::test_sequence_numbers_continue_above_the_highest_version_in_elasticsearch",
        ),
    ),
    Mutant(
        "recover forgets that detect lagged",
        _RECOVER,
        "min(since, observed.get(lane, BEGINNING))",
        "since",
        (
            "tests/contract/pipeline/maintenance/test_recover.py::test_a_rewind_goes_back_further_where_detect_lagged_at_the_backup",
        ),
    ),
    Mutant(
        "the audit leaves what the ledger never heard of",
        "pipeline.audit.repair",
        "done += await self._remove([verdict.document], verdict.strangers)",
        "pass",
        (_SAFEGUARDS,),
    ),
    Mutant(
        "the audit overlooks orphans",
        "pipeline.audit.compare",
        "sorted(surplus),",
        "(),",
        ("tests/unit/pipeline/audit/test_audit.py",),
    ),
    # Queries
    Mutant(
        "groups that were observed earlier come back",
        _IDENTITIES,
        " WHERE excluded.observed_at >= m.observed_at",
        "",
        (_SEARCH + "::test_memberships_observed_earlier_do_not_replace_newer_ones",),
    ),
    Mutant("a membership opens nothing", _ACCESS, "held.update(qualify(source, groups))", "pass"),
    Mutant(
        "groups of one source count in every source",
        _ACCESS,
        "held.update(qualify(source, groups))",
        "held.update(tag for name in sources for tag in qualify(name, groups))",
        (_SAFEGUARDS,),
    ),
    Mutant(
        "required tags are not verified",
        _VERIFY,
        " AND a.required_tags <@ %(tags)s::text[]",
        "",
        (_SEARCH + "::test_the_final_access_check_rejects_unreadable_candidates_of_the_stores",),
    ),
    Mutant(
        "candidates are not verified",
        _VERIFY,
        " AND a.acl_tags && %(tags)s::text[]",
        "",
        (_SEARCH + "::test_access_tags_forged_in_a_store_are_not_trusted",),
    ),
    Mutant(
        "a remembered answer is of no access set",
        _RETRIEVAL,
        "caller.tenant, scope.access\n",
        'caller.tenant, b""\n',
        (_AGAIN + "::test_cached_results_are_not_shared_between_different_access",),
    ),
    Mutant(
        "the access set leaves out which sets are readable",
        "query.retrieval.cache",
        'array("q", sorted(readable.access_ids)).tobytes()',
        'b""',
        (_SAFEGUARDS,),
    ),
    Mutant(
        "a remembered answer is not verified again",
        _RETRIEVAL,
        "len(current) < len(counted) or",
        "False or",
        (_AGAIN + "::test_a_cached_result_is_dropped_when_its_documents_change",),
    ),
    Mutant(
        "a remembered answer counts as of after the stores were asked",
        _RETRIEVAL,
        "        if not skipped_feedback:",
        '        async with self._stores.connection(self._stores.timeouts.ledger, "search", scope.caller.tenant) as late:\n            scope = replace(scope, snapshot=await snapshot(late))\n        if not skipped_feedback:',
        (_AGAIN + "::test_a_store_that_settles_during_a_search_invalidates_its_cached_result",),
    ),
    # Connectors
    Mutant(
        "the source's answer outranks a later one",
        _COMPARE,
        "stamp is not None and observation.at < stamp for stamp",
        "False for stamp",
        (_COMPARING,),
    ),
    Mutant(
        "a document in doubt counts as published as it is",
        _COMPARE,
        "return self.in_doubt_since is not None\n",
        "return False\n",
        (_COMPARING,),
    ),
    Mutant(
        "a listing ends the doubt",
        _COMPARE,
        "updated = replace(updated, in_doubt_since=observation.at)",
        "updated = replace(updated, in_doubt_since=None)",
        (_COMPARING,),
    ),
    Mutant(
        "what is in doubt is not fetched",
        _COMPARE,
        "if row is None or row.is_in_doubt:",
        "if row is None:",
        (_COMPARING,),
    ),
    Mutant(
        "the delete of a document in doubt is not published",
        _COMPARE,
        'if not row.is_published:\n        return Decision("unchanged", gone)',
        'if row.is_in_doubt or not row.is_published:\n        return Decision("unchanged", gone)',
        (_COMPARING,),
    ),
    Mutant(
        "a deleted document stays published",
        _COMPARE,
        "        gone=True,",
        "        gone=False,",
        (_COMPARING,),
    ),
    Mutant(
        "a new title is no change",
        _COMPARE,
        "        event.title,\n",
        "",
        (_COMPARING,),
    ),
    Mutant(
        "the version is of the decision, not of the stamp",
        _COMPARE,
        "version_at(observation.at, row.version)",
        "version_at(datetime.now(observation.at.tzinfo), row.version)",
        (_COMPARING,),
    ),
    Mutant(
        "access of an older answer counts",
        _COMPARE,
        "row.access_at is not None and observation.at < row.access_at",
        "False",
        (_COMPARING,),
    ),
    Mutant(
        "required tags that cannot be said are dropped",
        _COMPARE,
        "if not all(map(is_tag, required_tags)):",
        "if False:",
        (_COMPARING,),
    ),
    Mutant(
        "an event is sent before the intent is recorded",
        _PUBLISH,
        "await self.rows.intend(",
        "await self._deliver(events, lane)\n                await self.rows.intend(",
        (_PUBLISHING,),
    ),
    Mutant(
        "no intent is recorded",
        _PUBLISH,
        "await self.rows.intend(intended, at, events)",
        "pass",
        (_PUBLISHING,),
    ),
    Mutant(
        "rows are saved before Kafka has the events",
        _PUBLISH,
        "await self._deliver(events, lane)",
        "await self.rows.save([decision.row for decision in publishing if decision.row], at)\n                await self._deliver(events, lane)",
        (_PUBLISHING,),
    ),
    Mutant(
        "a row is saved though Kafka has refused its event",
        _PUBLISH,
        "                await deliver(self._producer.send(_topic(event, lane), event) for event in batch)",
        "                with __import__('contextlib').suppress(Exception):\n                    await deliver(self._producer.send(_topic(event, lane), event) for event in batch)",
        (_PUBLISHING,),
    ),
    Mutant("a late answer is saved", _PUBLISH, ' and decision.outcome != "late"]', "]", (_PUBLISHING,)),
    Mutant(
        "a delete waits behind a crawl",
        _PUBLISH,
        'if lane == "backfill" and isinstance(event, DocumentUpserted)',
        'if lane == "backfill"',
        (_PUBLISHING,),
    ),
    Mutant(
        "of two answers of one page the earlier counts",
        _PUBLISH,
        "{entry.external_id: entry for entry in entries}",
        "{entry.external_id: entry for entry in reversed(entries)}",
        (_PUBLISHING,),
    ),
    Mutant(
        "an intent ignores the fence",
        _ROWS,
        'await require_lease(connection, self.holder)\n                await keep_stamp(connection, *self._me, stamp)\n                cursor = await connection.execute(\n                    """\n                    INSERT INTO connector_items (tenant',
        'await keep_stamp(connection, *self._me, stamp)\n                cursor = await connection.execute(\n                    """\n                    INSERT INTO connector_items (tenant',
        (_DOUBT + "::test_a_runner_that_lost_its_lease_publishes_no_old_text",),
    ),
    Mutant(
        "the stamp of an intent is not kept",
        _ROWS,
        '                await keep_stamp(connection, *self._me, stamp)\n                cursor = await connection.execute(\n                    """\n                    INSERT INTO connector_items (tenant',
        '                cursor = await connection.execute(\n                    """\n                    INSERT INTO connector_items (tenant',
        (_DOUBT + "::test_the_clock_of_the_next_runner_continues_after_the_stamp_of_an_intent",),
    ),
    Mutant(
        "rows are saved without the fence",
        _ROWS,
        "                await require_lease(connection, self.holder)\n                await connection.cursor().executemany(",
        "                await connection.cursor().executemany(",
        (_DOUBT + "::test_a_runner_that_lost_its_lease_cannot_confirm_the_intents_of_its_successor",),
    ),
    Mutant(
        "a membership is sent before the intent is recorded",
        _GROUPS,
        "        await self._tables.intend(batch)\n",
        "",
        (_PUBLISHING,),
    ),
    Mutant(
        "a membership is recorded before it is sent",
        _GROUPS,
        "        await self._tables.intend(batch)\n",
        "        await self._tables.intend(batch)\n        await self._tables.confirm(batch)\n",
        (_PUBLISHING,),
    ),
    Mutant(
        "a membership that was taken back gets an older stamp",
        _MEMBERSHIP,
        "max(at, last.observed_at + timedelta(microseconds=1))",
        "at",
        (_PUBLISHING,),
    ),
    Mutant(
        "who is in no listing any more keeps the groups",
        _GROUPS,
        "sorted(tags.keys() | published.keys())",
        "sorted(tags.keys())",
        (_PUBLISHING,),
    ),
    Mutant(
        "stamps may go back",
        "connectors.clock",
        "max(datetime.now(UTC), self.last + timedelta(microseconds=1))",
        "datetime.now(UTC)",
        (_PUBLISHING,),
    ),
    Mutant(
        "a page is stamped when it has arrived",
        _CRAWL,
        "yield at, page",
        "yield self._clock.stamp(), page",
        (_READING + "::test_each_page_is_stamped_before_it_is_requested_and_after_the_one_before",),
    ),
    Mutant(
        "the access in a listing is stamped when it has arrived",
        _LISTING,
        "publish_access(changed_access, at)",
        "publish_access(changed_access, self._clock.stamp())",
        (_READING + "::test_the_access_that_a_listing_shows_is_stamped_before_the_page_is_requested",),
    ),
    Mutant(
        "access seen during an older request is not written where it is unchanged",
        _LISTING,
        "            or id_ in requested\n",
        "",
        (_READING + "::test_access_observed_during_an_older_request_is_saved_although_it_is_unchanged",),
    ),
    Mutant(
        "changes are read from after the first load",
        _CRAWL,
        '        progress = await self._started()\n        if "again"',
        '        progress = await self._state.read_progress()\n        if "again"',
        (_READING + "::test_the_cursor_of_changes_is_older_than_the_first_load",),
    ),
    Mutant(
        "two tasks publish one document at once",
        _PUBLISH,
        "async with self._locks.hold(by_id):",
        "async with self._locks.hold(()):",
        (_PUBLISHING + "::test_of_one_document_two_tasks_publish_one_after_the_other_and_of_two_at_once",),
    ),
    Mutant(
        "a file is published under the rules that the listing read",
        "connectors.folder.sweep",
        "await asyncio.to_thread(walk.access_now, [candidate for candidate, _ in group])",
        "[candidate for candidate, _ in group]",
        (
            "tests/contract/connectors/folder/test_scan.py::test_a_file_restricted_while_it_is_being_scanned_is_published_under_the_new_rules",
        ),
    ),
    Mutant("versions may go back", "connectors.clock", "return max((last or 0) + 1,", "return max(0,", (_PUBLISHING,)),
    # Up to which time a source is complete
    Mutant(
        "a source is complete once Kafka has what a listing showed",
        _FRESHNESS,
        "if state.oldest is not None and state.oldest <= ended:",
        "if False:",
    ),
    Mutant(
        "a source is complete up to the end of a listing",
        _FRESHNESS,
        "began, exact = waiting[0].began,",
        "began, exact = waiting[0].ended,",
    ),
    Mutant(
        "what is in doubt counts as published",
        _FRESHNESS,
        " or state.is_in_doubt",
        "",
        (_COMPLETE + "::test_a_document_in_doubt_holds_the_time_back",),
    ),
    Mutant("what is published is not recorded", _PUBLISH, "intend(intended, at, events)", "intend(intended, at)"),
    Mutant(
        "a listing without revisions shows edits",
        _LISTING,
        "has_revisions=not lacks_revisions",
        "has_revisions=True",
        (_COMPLETE + "::test_a_listing_without_revisions_verifies_access_alone",),
    ),
    Mutant(
        "memberships count once Kafka has them",
        _FRESHNESS,
        'if waiting and await _ask(connection, "SELECT members_are_applied(%s, %s)", self._instance):',
        "if waiting:",
        (_COMPLETE + "::test_groups_that_the_ledger_lacks_hold_the_time_back",),
    ),
)


class _Finder:
    """Imports one module with its text changed."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: Any = None) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        path = str(path_of(self._mutant))
        return importlib.util.spec_from_file_location(name, path, loader=_Loader(name, path, self._mutant))


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        source = Path(self.path).read_text()
        assert source.count(self._mutant.anchor) >= 1
        return compile(source.replace(self._mutant.anchor, self._mutant.defect, 1), self.path, "exec")


def path_of(mutant: Mutant) -> Path:
    """The module's file."""
    return ROOT / (mutant.module.replace(".", "/") + ".py")


class Caught(NamedTuple):
    """How a mutant was caught: ``by`` a law of the simulation, "unit" or "contract"; "survived" if it was not."""

    by: str
    where: str = ""
    """The history's seed, or the test."""


class _FirstFailure:
    """A plugin of pytest."""

    test = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.when == "call" and not self.test:
            self.test = report.nodeid.partition("[")[0]


def attack(number: int) -> Caught:
    """In a process of its own, in which no module of ours is loaded yet."""
    mutant = MUTANTS[number]
    sys.meta_path.insert(0, _Finder(mutant))  # type: ignore[arg-type]
    caught = _simulate(mutant)
    if caught.by == "survived" and mutant.tests:
        caught = _test(mutant)
    return caught


def _simulate(mutant: Mutant) -> Caught:
    from tests.simulation import oracle
    from tests.simulation.changes import is_connected
    from tests.simulation.play import History, play, simulated

    assert oracle, "it brings the modules of queries along"
    if mutant.module not in sys.modules:
        return Caught("survived")
    seeds = range(1, (min(HISTORIES, HISTORIES_BESIDE_TESTS) if mutant.tests else HISTORIES) + 1)
    if mutant.module.startswith("connectors."):
        seeds = [seed for seed in range(1, HISTORIES + 1) if is_connected(seed)]
    before = [seed for seed in _before(mutant) if seed in seeds]
    with simulated():
        for seed in (*before, *seeds):
            if (kind := play(History(seed)).kind) is not None:
                return Caught(kind.rstrip(":"), str(seed))
    return Caught("survived")


def _before(mutant: Mutant) -> list[int]:
    """The history that caught it the last time, by the table."""
    match = re.search(rf"^\| {re.escape(mutant.name)} \| [^|]+ \| \w+ \| (\d+) \|", TABLE.read_text(), re.MULTILINE)
    return [int(match[1])] if match else []


def _test(mutant: Mutant) -> Caught:
    import pytest
    from hypothesis import Phase, settings

    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None)  # nothing to shrink
    settings.load_profile("mutants")
    options = [
        "-qx",
        "-pno:cacheprovider",
        "-Wignore::pytest.PytestAssertRewriteWarning",
        *([] if mutant.contracts else ["--noconftest"]),
    ]
    first = _FirstFailure()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        pytest.main([*options, *mutant.tests], plugins=[first])
    return Caught(first.test.split("/")[1], first.test) if first.test else Caught("survived")


def _all(kept: Path | None) -> dict[str, Caught]:
    """kept: a file of what an earlier run that was cut off has found already."""
    done: dict[str, Caught] = {}
    if kept is not None and kept.exists():
        done = {name: Caught(*caught) for name, *caught in map(json.loads, kept.read_text().splitlines())}
    left = sorted((n for n, m in enumerate(MUTANTS) if m.name not in done), key=lambda n: len(MUTANTS[n].contracts))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    processes = int(os.environ.get("SIMULATE_PROCESSES", os.cpu_count() or 1))
    with ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool:
        for number, caught in zip(left, pool.map(attack, left), strict=True):
            name = MUTANTS[number].name
            done[name] = caught
            print(f"{name}: {caught.by} {caught.where}", flush=True)
            if kept is not None and caught.by != "survived":
                with kept.open("a") as file:
                    file.write(json.dumps([name, *caught]) + "\n")
    return {mutant.name: done[mutant.name] for mutant in MUTANTS}


def figures(caught: Collection[Caught]) -> str:
    """Return in a sentence how many mutants were caught by what."""
    by = Counter(c.by if c.by in ("unit", "contract", "survived") else "simulation" for c in caught)
    return (
        f"Of {len(caught)} defects the simulation caught {by['simulation']}, a unit test {by['unit']} and a contract"
        f" test {by['contract']}; {by['survived'] or 'none'} survived."
    )


def table(caught: Mapping[str, Caught]) -> str:
    """docs/mutants.md."""
    rows = [
        f"| {m.name} | `{m.module}` | {c.by} | {c.where if c.where.isdigit() else f'`{c.where}`'} |"
        for m in MUTANTS
        for c in [caught[m.name]]
    ]
    return (
        "# Mutants\n\nDeliberate defects of the protocol and what caught each: a law of the simulation (broken in the"
        " history of this seed), or\na test (`make mutants` writes this table;"
        " [ADR 41](adr/0041-deterministic-simulation.md)). Each is first played against the\nsimulation, at most"
        f" {HISTORIES:,} histories of it ({HISTORIES_BESIDE_TESTS} where tests are named for it, which it meets then; of connectors\nall those of {HISTORIES:,} that have connectors). BROKEN:"
        f" a worker ended\nby an exception; UNTOLD: the last announcement is wrong.\n\n{figures(list(caught.values()))}\n\n"
        "| Defect | Module | Caught by | History or test |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def main() -> int:
    """Write the table; the exit code is 1 when a mutant survived."""
    began = time.monotonic()
    kept = os.environ.get("MUTANTS_KEPT")
    caught = _all(Path(kept) if kept else None)
    TABLE.write_text(table(caught))
    print(f"{figures(list(caught.values()))} {time.monotonic() - began:.0f} s")
    return int(any(c.by == "survived" for c in caught.values()))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
