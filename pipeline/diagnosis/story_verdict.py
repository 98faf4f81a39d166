"""Judges a document's story: whether both stores return it as it is now, why not, and what would change that.

Pure; docs/why.md has the table of its states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from shlex import quote
from typing import Literal, get_args

from pipeline.diagnosis.story_model import Context, DeadLetter, GenerationProgress, Source, StoreProgress, Story

State = Literal[
    "unknown",
    "refused",
    "source_paused",
    "source_failing",
    "source_not_running",
    "source_loading",
    "queued",
    "lost",
    "dead_letter",
    "dismissed",
    "replayed",
    "stub",
    "deleted",
    "nobody",
    "no_generation",
    "waiting",
    "stands_still",
    "failed",
    "empty",
    "differs",
    "unreadable",
    "partial",
    "searchable",
]
Absence = tuple[State, str, str | None]
"""State, sentence, next step."""
STATES: tuple[State, ...] = get_args(State)

BREAKS = frozenset(
    {
        "missing",
        "wrong_access",
        "wrong_text",
        "wrong_entry",
        "unreachable",
        "no_state",
        "stale_manifest",
        "rotten_body",
    }
)
"""Kinds of the audit's differences that prevent a search from returning the document as it is. The other kinds are
surplus in a store: every query checks its results against the ledger."""
MENDING = {
    "too_large": "make it smaller at the source, or split it",
    "needs_ocr": "its pages are images: replace it at the source with a version that has text",
    "encrypted": "replace it at the source with a version without a password",
    "unsupported": "replace it at the source with a version in a supported format (docs/connectors)",
    "permission": "give the connector's account read access at the source",
    "unconfined": "run the connectors where the kernel has Landlock and seccomp (docs/extraction.md)",
}
"""The next step, by the code of a document that a connector cannot read; the message of other codes is enough."""
BY_HAND = {
    "too_large": "make it smaller, or split it",
    "needs_ocr": "run text recognition (OCR) on it first",
    "encrypted": "save it without a password",
    "unsupported": "convert it to a supported format (docs/extraction.md)",
    "empty": "add text to it",
    "permission": "give the user who ingests it read access",
    "unconfined": "ingest it where the kernel has Landlock and seccomp (docs/extraction.md)",
    "io_error": "repair the disk or the share that it is on",
    "changing": "wait until it is no longer being written",
}
"""The next step for a file that `penstock ingest` skipped, by its code."""


@dataclass(frozen=True, slots=True)
class Verdict:
    searchable: bool
    """Both stores return the document as it is now, to those who may read it."""
    state: State
    reason: str
    """One sentence that begins with a lower-case letter: "it was deleted on 1 May"."""
    next: str | None = None
    """The next step, as a command where there is one."""
    notes: tuple[str, ...] = ()
    """Further facts, worst first."""


def judge(story: Story, context: Context | None = None) -> Verdict:
    """Judge with the ledger alone where there is no context."""
    context = context or Context()
    verdict = _judge(story, context)
    return replace(
        verdict, notes=(*verdict.notes, *_notes(story, context), *(f"not checked: {part}" for part in context.away))
    )


def _judge(story: Story, context: Context) -> Verdict:
    document, active = story.document, story.active
    if document is None:
        return Verdict(False, *_judge_absent(story, context))
    if document.deleted_at is not None:
        return Verdict(False, "deleted", *_deleted(story, context))
    if document.version is None:
        return Verdict(
            False,
            "stub",
            "only a change of access has arrived so far; its content has not been published yet",
            _again(story, context),
        )
    if not story.access.acl_tags:
        return Verdict(
            False,
            "nobody",
            "nobody may read it: it has no access tags, and a document without access tags is not indexed",
            "penstock ingest PATH --acl TAG"
            if document.identity.source == "folder"
            else f"give it readers at its source {document.identity.source}, or publish an access change",
        )
    if active is None:
        return Verdict(
            False, "no_generation", "there is no active generation: run `penstock migrate`", "penstock migrate"
        )
    if waiting := _waiting(story, active, context):
        return waiting
    if not active.chunks:
        return Verdict(
            False,
            "empty",
            "its text is empty, so there is nothing to search",
            "publish it with text; scanned images need OCR at the source",
        )
    if differs := _differs(active, context):
        return differs
    holds = f"both stores hold its {active.chunks} chunks"
    state: State = "searchable"
    if active.vectors.state == "partial":
        state = "partial"
        holds = (
            f"{active.vectors.refused} of its {active.chunks} chunks can never be embedded"
            " and are found by keywords only"
        )
    holds += _later_dead(story)
    if context.person is not None and not context.person.may_read:
        return Verdict(True, "unreadable", f"{holds}, but {_barred(story, context)}", _let_in(story, context))
    return Verdict(True, state, holds, _replay(story))


def _deleted(story: Story, context: Context) -> tuple[str, str | None]:
    document = story.document
    assert document is not None
    reason = f"it was deleted on {moment(document.deleted_at)}"
    by = next((e for e in reversed(story.events) if e.kind.startswith("document.deleted")), None)
    source = context.source
    if source is not None and source.item is not None and source.item.gone:
        reason += f" by connector {source.name}, which no longer found it at the source"
    elif by is not None:
        reason += f" by an event of source {document.identity.source} that arrived on {moment(by.at)}"
    return f"{reason}: an event observed after that brings it back", _again(story, context)


def _again(story: Story, context: Context) -> str | None:
    """The command that reads the document from its source again."""
    identity = story.document.identity if story.document else None
    if identity is None:
        return None
    if context.source is not None and not context.source.by_hand:
        return f"penstock connector run {quote(identity.source)} --document {quote(identity.external_id)}"
    if identity.source == "folder":
        return f"penstock ingest {quote(identity.external_id)}"
    return f"publish it again from source {identity.source}"


def _waiting(story: Story, active: GenerationProgress, context: Context) -> Verdict | None:
    stores = {"vectors": active.vectors, "keywords": active.keywords}
    waiting = {name: progress for name, progress in stores.items() if not progress.reached}
    if not waiting:
        return None
    reason = " and ".join(_waits(name, progress, context) for name, progress in waiting.items())
    if len(waiting) == 1 and active.chunks:
        reason += f"; it is found by {'keywords' if 'vectors' in waiting else 'vectors'} only"
    reason += _later_dead(story)
    if any(name in context.outages for name in waiting):
        return Verdict(
            False,
            "stands_still",
            reason,
            "restore that service: the work then continues by itself (`penstock status` shows it)",
        )
    failed = next((name for name, progress in waiting.items() if progress.state == "failed"), None)
    if failed:
        step = "fix the cause that the error names; it is retried automatically"
        return Verdict(False, "failed", reason, f"{step}, or at once by `penstock audit --repair`")
    idle = next((q for name in waiting if (q := context.queue(name)) and not q.members), None)
    return Verdict(False, "waiting", reason, f"penstock worker {idle.stage}" if idle else "penstock status")


def _waits(name: str, progress: StoreProgress, context: Context) -> str:
    since = f" since {moment(progress.pending_since)}" if progress.pending_since else ""
    before = f", {progress.before} documents before it" if progress.before else ""
    if trouble := context.outages.get(name):
        before += f"; {name} is stalled: {trouble}"
    retry = f", next attempt at {moment(progress.next_retry)}" if progress.next_retry else ""
    if progress.state == "failed":
        return f"{name} failed {progress.attempts} times{since} ({progress.error}){retry}{before}"
    why = f" ({progress.error}){retry}" if progress.error else ""
    queue = context.queue(name)
    if queue is None:
        return f"waiting for {name}{since}{why}{before}: is the {name} worker running?"
    if not queue.members:
        return f"waiting for {name}{since}{why}{before}: no {name} worker runs"
    ahead = f", {queue.behind} records to read in partition {queue.partition} of {queue.topic}" if queue.behind else ""
    return f"waiting for {name}{since}{why}{before}{ahead}"


def _differs(active: GenerationProgress, context: Context) -> Verdict | None:
    wrong = [h for h in context.differences or () if h.generation == active.name and h.kind in BREAKS]
    if not wrong:
        return None
    differences = "; ".join(
        f"{h.store}: {h.meaning}" + (f" ({h.chunks} of {active.chunks} chunks)" if h.chunks else "") for h in wrong
    )
    rotten = any(h.kind == "rotten_body" for h in wrong)
    return Verdict(
        False,
        "differs",
        f"it is searchable according to the ledger, but the stores differ: {differences}",
        "publish it again, then `penstock audit --repair`" if rotten else "penstock audit --repair",
    )


def _barred(story: Story, context: Context) -> str:
    person = context.person
    assert person is not None
    who = " and ".join(person.names)
    if not person.by:
        return f"{who} may not read it: they hold none of its access tags ({_some(story.access.acl_tags)})"
    return f"{who} may not read it: they lack the required {', '.join(person.lacks)}"


def _let_in(story: Story, context: Context) -> str:
    person = context.person
    assert person is not None
    tags = person.lacks or story.access.acl_tags
    where = " and ".join(tags) if person.by else f"one of {_some(tags)}"
    step = f"add {' and '.join(person.names)} to {where} at the source"
    return (
        step
        if not context.source or context.source.by_hand
        else f"{step}, then `penstock connector run {quote(context.source.name)}`"
    )


def _some(tags: Sequence[str], most: int = 5) -> str:
    return ", ".join(tags[:most]) + (f" and {len(tags) - most} more" if len(tags) > most else "")


def _later_dead(story: Story) -> str:
    """Mentions a newer event that was refused: then searches do not return the newest version. Letters that were
    replayed or dismissed do not count."""
    later = _later(story)
    return f"; a later event is a dead letter ({later.code}), so this is not its newest version" if later else ""


def _later(story: Story) -> DeadLetter | None:
    last_event = max((e.at for e in story.events), default=None)
    later = [d for d in story.dead if d.is_open and (last_event is None or d.at > last_event)]
    return later[-1] if later else None


def _replay(story: Story) -> str | None:
    later = _later(story)
    return f"fix the cause, then run `penstock dead replay {quote(later.id)}`" if later else None


def _notes(story: Story, context: Context) -> list[str]:
    """Facts that the verdict does not contain."""
    notes = []
    document, source = story.document, context.source
    if document is not None and story.events and story.events[-1].outcome == "stale":
        last = story.events[-1]
        notes.append(
            f"its newest event (version {last.version}, arrived {moment(last.at)}) was stale: older than"
            " the accepted one"
        )
    if context.superseded:
        notes.append(
            f"version {', '.join(map(str, context.superseded))} was observed later, but lost to version"
            f" {document.version if document else '?'}: the greater version wins"
        )
    if document is not None and source is not None:
        notes += _of_source(document.version, document.alive, source, context)
    for generation in story.generations:
        stores = (generation.vectors, generation.keywords)
        active = story.active
        if generation.active or not generation.chunks or active is None:
            continue
        if all(s.reached for s in stores) and not (active.vectors.reached and active.keywords.reached):
            notes.append(f"generation {generation.name} ({generation.state}) holds it, but queries use {active.name}")
    for h in context.differences or ():
        if h.kind not in BREAKS or (story.active is not None and h.generation != story.active.name):
            notes.append(f"{h.generation}, {h.store}: {h.meaning}; no query shows that (`penstock audit --repair`)")
    return notes


def _of_source(version: int | None, alive: bool, source: Source, context: Context) -> list[str]:
    notes = []
    item = source.item
    if item is not None and item.problem_code is not None:
        notes.append(
            f"{source.speaker} cannot publish its present content ({item.problem_code}: {item.problem_message}):"
            " the stores hold older content"
        )
    elif (
        item is not None and item.version is not None and not item.gone and (version is None or item.version > version)
    ):
        queue = context.queue("detect")
        where = f": {queue.behind} records to read in partition {queue.partition} of {queue.topic}" if queue else ""
        notes.append(f"version {item.version} was published and has not been processed yet{where}")
    elif item is not None and item.gone and alive:
        notes.append(f"{source.speaker} has published its deletion, which has not been processed yet")
    if source.held_back and alive:
        guard = source.guard or {}
        notes.append(
            f"the sweep of {moment(datetime.fromisoformat(str(guard['at'])))} no longer listed it, and would delete"
            f" {guard.get('missing')} of {guard.get('published')} documents: nothing is deleted until you run"
            f" `penstock connector run {quote(source.name)} --allow-mass-delete`"
        )
    if source.state in ("paused", "removed"):
        notes.append(
            f"connector {source.name} is {source.state}: newer changes are read after"
            f" `penstock connector resume {quote(source.name)}`"
        )
    elif source.state == "not running":
        notes.append(
            f"connector {source.name} does not run, so newer changes are not read: start `penstock worker connectors`"
        )
    elif source.state in ("needs attention", "waiting"):
        notes.append(f"connector {source.name} cannot read its source at present ({source.problem})")
    return notes


def _judge_absent(story: Story, context: Context) -> Absence:
    """Judge a document without a row in the ledger."""
    source = context.source
    if source is not None and source.item is not None and source.item.problem_code is not None:
        return _refused(source, context)
    if story.dead:
        return _absent_dead(story)
    if source is not None and source.item is not None and source.item.version is not None and not source.item.gone:
        return _published(source, context)
    if source is not None and source.item is not None and source.item.gone:
        return (
            "unknown",
            f"{source.speaker} published its deletion before its content reached the ledger",
            _read_again(source, context),
        )
    if source is not None and not source.by_hand:
        return _absent_from_source(source, context)
    reason = "no event about it has ever arrived"
    if context.inactive:
        names = ", ".join(f"{source.name} ({source.state})" for source in context.inactive)
        return (
            "unknown",
            f"{reason}; these connectors of the tenant do not follow their source at present: {names}",
            "penstock connector status",
        )
    return "unknown", reason, "penstock ingest PATH, or check with penstock connector list that its source is connected"


def _refused(source: Source, context: Context) -> Absence:
    item = source.item
    assert item is not None
    code = item.problem_code or ""
    step = MENDING.get(code, "fix it at the source")
    if source.by_hand:
        return (
            "refused",
            f"`penstock ingest` skipped it when it last read it on {moment(item.seen_at)}"
            f" ({code}: {item.problem_message})",
            f"{BY_HAND.get(code, 'save it again, or convert it')}; then `{_read_again(source, context)}`",
        )
    return (
        "refused",
        f"connector {source.name} cannot publish it ({code}: {item.problem_message})",
        f"{step}; the connector reads it again at its next sweep, or with `{_read_again(source, context)}`",
    )


def _read_again(source: Source, context: Context) -> str:
    if source.by_hand and source.item is not None:
        return f"penstock ingest {quote(source.item.external_id)}"
    name = source.item.external_id if source.item is not None else context.name
    return f"penstock connector run {quote(source.name)} --document {quote(name or 'EXTERNAL_ID')}"


def _published(source: Source, context: Context) -> Absence:
    item, queue = source.item, context.queue("detect")
    assert item is not None
    known = f"{source.speaker} published version {item.version} of it"
    if item.content_at is not None:
        known += f" on {moment(item.content_at)}"
    if queue is None:
        return (
            "queued",
            f"{known}, and it has not been processed yet: is the detect worker running?",
            "penstock status",
        )
    if not queue.members:
        return "queued", f"{known}, and no detect worker runs to process it", "penstock worker detect"
    if queue.behind:
        where = f"{queue.behind} records of partition {queue.partition} of {queue.topic}"
        if trouble := context.outages.get("detect"):
            return (
                "queued",
                f"{known}; detect has yet to read {where} and is stalled: {trouble}",
                "penstock status",
            )
        return "queued", f"{known}; detect has yet to read {where}, this one among them", "penstock status"
    return (
        "lost",
        f"{known}, and detect has read all of its partition without it: the ledger is older than the connector's"
        " table of published documents, as after a restore",
        f"penstock recover --since TIME, or {_read_again(source, context)}",
    )


def _absent_from_source(source: Source, context: Context) -> Absence:
    name = quote(source.name)
    last = f"; its last success was on {_said(source.last_success_at)}" if source.last_success_at else ""
    match source.state:
        case "paused" | "removed":
            return (
                "source_paused",
                f"no event about it has ever arrived, and connector {source.name} is {source.state}{last}",
                f"penstock connector resume {name}",
            )
        case "not running":
            return (
                "source_not_running",
                f"no event about it has ever arrived, and nothing runs connector {source.name}{last}",
                "penstock worker connectors",
            )
        case "needs attention" | "waiting":
            return (
                "source_failing",
                f"no event about it has ever arrived, and connector {source.name} cannot read its source"
                f" ({source.problem}){last}",
                f"penstock connector check {name}",
            )
        case "first load":
            return (
                "source_loading",
                f"connector {source.name} is in its first load and has not read it yet",
                f"penstock connector status {name}",
            )
        case _:
            return (
                "unknown",
                f"connector {source.name} follows its source and has never listed it{last}: it does not exist there"
                " under this id, a rule excludes it, or the connector's account may not read it",
                _read_again(source, context),
            )


def _absent_dead(story: Story) -> Absence:
    waiting = [d for d in story.dead if d.is_open]
    if waiting:
        last = waiting[-1]
        return (
            "dead_letter",
            f"its only events are dead letters, the last one at {moment(last.at)} ({last.code}: {last.message}):"
            f" fix the cause and publish it again, or run `penstock dead replay {last.id}`",
            f"penstock dead show {quote(last.id)}",
        )
    replayed = [d for d in story.dead if d.replayed_at is not None]
    if replayed:
        at = max(d.replayed_at for d in replayed if d.replayed_at)
        return (
            "replayed",
            f"its dead letter was replayed at {moment(at)} and has not arrived: is the detect worker running?",
            "penstock status",
        )
    last = story.dead[-1]
    return (
        "dismissed",
        f"its only events are dead letters, and {last.dismissed_by} dismissed the last one on"
        f" {moment(last.dismissed_at)} ({last.dismissed_reason})",
        f"publish it again, or penstock dead dismiss {quote(last.id)} --undo",
    )


def _said(at: str) -> str:
    return moment(datetime.fromisoformat(at))


def moment(at: datetime | None) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S %Z").strip() if at else "?"
