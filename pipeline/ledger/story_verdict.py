"""What follows from a document's story: whether both stores return it as it is now, why not, and what would change
that. Pure; the table of its states is docs/why.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from shlex import quote
from typing import Literal, get_args

from pipeline.ledger.story_absent import absent, moment
from pipeline.ledger.story_origin import Source
from pipeline.ledger.story_shape import Around, DeadLetter, GenerationProgress, StoreProgress, Story

State = Literal[
    "unknown", "refused", "source_paused", "source_failing", "source_not_running", "source_loading", "queued", "lost",
    "dead_letter", "dismissed", "replayed",
    "stub", "deleted", "nobody", "no_generation", "waiting", "stands_still", "failed", "empty", "differs",
    "unreadable", "partial", "searchable",
]  # fmt: skip
STATES: tuple[State, ...] = get_args(State)

BREAKS = frozenset({
    "missing", "wrong_access", "wrong_text", "wrong_entry", "unreachable", "no_state", "stale_manifest", "rotten_body",
})  # fmt: skip
"""Differences of the audit that keep a document from being found as it is. The others are surplus in a store: every
query checks what it found with the ledger."""


@dataclass(frozen=True, slots=True)
class Verdict:
    searchable: bool
    """Both stores return the document as it is now, to those who may read it."""
    state: State
    reason: str
    """One sentence, in small letters at its beginning: "it was deleted on …"."""
    next: str | None = None
    """The next step, as a command where there is one."""
    notes: tuple[str, ...] = ()
    """What else is worth knowing, worst first."""


def judge(story: Story, around: Around | None = None) -> Verdict:
    """Without ``around``: what the ledger alone says."""
    around = around or Around()
    found = _judge(story, around)
    return replace(
        found, notes=(*found.notes, *_notes(story, around), *(f"not looked at: {one}" for one in around.away))
    )


def _judge(story: Story, around: Around) -> Verdict:
    document, active = story.document, story.active
    if document is None:
        return Verdict(False, *absent(story, around))
    if document.deleted_at is not None:
        return Verdict(False, "deleted", *_deleted(story, around))
    if document.version is None:
        return Verdict(
            False, "stub", "only a change of access has arrived so far: its content has yet to be published",
            _again(story, around),
        )  # fmt: skip
    if not story.access.acl_tags:
        return Verdict(
            False, "nobody", "nobody may read it: it has no access tags, so nothing of it is indexed until it gets one",
            "penstock ingest PATH --acl TAG" if document.identity.source == "folder" else
            f"give it readers at its source {document.identity.source}, or publish an access change",
        )  # fmt: skip
    if active is None:
        return Verdict(
            False, "no_generation", "there is no active generation: run `penstock migrate`", "penstock migrate"
        )
    if waiting := _waiting(story, active, around):
        return waiting
    if not active.chunks:
        return Verdict(
            False, "empty", "its text is empty: there is nothing to find",
            "publish it with text; pictures of text need OCR at the source",
        )  # fmt: skip
    if differs := _differs(active, around):
        return differs
    holds = f"both stores hold its {active.chunks} chunks"
    state: State = "searchable"
    if active.vectors.state == "partial":
        state = "partial"
        holds = (
            f"{active.vectors.refused} of its {active.chunks} chunks can never be embedded"
            " and are found by keyword only"
        )
    holds += _later_dead(story)
    if around.person is not None and not around.person.may_read:
        return Verdict(True, "unreadable", f"{holds}, but {_barred(story, around)}", _let_in(story, around))
    return Verdict(True, state, holds, _replay(story))


def _deleted(story: Story, around: Around) -> tuple[str, str | None]:
    document = story.document
    assert document is not None
    reason = f"it was deleted on {moment(document.deleted_at)}"
    by = next((e for e in reversed(story.events) if e.kind.startswith("document.deleted")), None)
    source = around.source
    if source is not None and source.item is not None and source.item.gone:
        reason += f" by connector {source.name}, which no longer found it at the source"
    elif by is not None:
        reason += f" by an event of source {document.identity.source} that arrived on {moment(by.at)}"
    return f"{reason}: an event observed after that brings it back", _again(story, around)


def _again(story: Story, around: Around) -> str | None:
    """How the source is asked once more."""
    identity = story.document.identity if story.document else None
    if identity is None:
        return None
    if around.source is not None and not around.source.by_hand:
        return f"penstock connector run {quote(identity.source)} --document {quote(identity.external_id)}"
    if identity.source == "folder":
        return f"penstock ingest {quote(identity.external_id)}"
    return f"publish it again from source {identity.source}"


def _waiting(story: Story, active: GenerationProgress, around: Around) -> Verdict | None:
    stores = {"vectors": active.vectors, "keywords": active.keywords}
    waiting = {name: progress for name, progress in stores.items() if not progress.reached}
    if not waiting:
        return None
    reason = " and ".join(_waits(name, progress, around) for name, progress in waiting.items())
    if len(waiting) == 1 and active.chunks:
        reason += f"; it is found by {'keyword' if 'vectors' in waiting else 'meaning'} only"
    reason += _later_dead(story)
    if any(name in around.trouble for name in waiting):
        return Verdict(
            False, "stands_still", reason, "mend that service: work goes on by itself, `penstock status` tells when"
        )
    failed = next((name for name, progress in waiting.items() if progress.state == "failed"), None)
    if failed:
        step = "mend what the error says; it is tried again by itself"
        return Verdict(False, "failed", reason, f"{step}, and `penstock audit --repair` has it tried sooner")
    idle = next((q for name in waiting if (q := around.queue(name)) and not q.members), None)
    return Verdict(False, "waiting", reason, f"penstock worker {idle.stage}" if idle else "penstock status")


def _waits(name: str, progress: StoreProgress, around: Around) -> str:
    since = f" since {moment(progress.pending_since)}" if progress.pending_since else ""
    before = f", {progress.before} documents before it" if progress.before else ""
    if trouble := around.trouble.get(name):
        before += f"; {name} stands still: {trouble}"
    if progress.state == "failed":
        retry = f", next try at {moment(progress.next_retry)}" if progress.next_retry else ""
        return f"{name} failed {progress.attempts} times{since} ({progress.error}){retry}{before}"
    why = f" ({progress.error})" if progress.error else ""
    queue = around.queue(name)
    if queue is None:
        return f"waiting for {name}{since}{why}{before}: is the {name} worker running?"
    if not queue.members:
        return f"waiting for {name}{since}{why}{before}: no {name} worker runs"
    ahead = f", {queue.behind} records to take in partition {queue.partition} of {queue.topic}" if queue.behind else ""
    return f"waiting for {name}{since}{why}{before}{ahead}"


def _differs(active: GenerationProgress, around: Around) -> Verdict | None:
    wrong = [h for h in around.held or () if h.generation == active.name and h.kind in BREAKS]
    if not wrong:
        return None
    told = "; ".join(
        f"{h.store}: {h.meaning}" + (f" ({h.chunks} of {active.chunks} chunks)" if h.chunks else "") for h in wrong
    )
    rotten = any(h.kind == "rotten_body" for h in wrong)
    return Verdict(
        False, "differs", f"the ledger says that it is searchable, but the stores differ: {told}",
        "publish it again, then `penstock audit --repair`" if rotten else "penstock audit --repair",
    )  # fmt: skip


def _barred(story: Story, around: Around) -> str:
    person = around.person
    assert person is not None
    who = " and ".join(person.names)
    if not person.by:
        return f"{who} may not read it: holds none of its access tags ({_some(story.access.acl_tags)})"
    return f"{who} may not read it: lacks the required {', '.join(person.lacks)}"


def _let_in(story: Story, around: Around) -> str:
    person = around.person
    assert person is not None
    wanted = person.lacks or story.access.acl_tags
    where = " and ".join(wanted) if person.by else f"one of {_some(wanted)}"
    step = f"put {' and '.join(person.names)} into {where} at the source"
    return (
        step
        if not around.source or around.source.by_hand
        else f"{step}, then `penstock connector run {quote(around.source.name)} --sweep`"
    )


def _some(tags: Sequence[str], most: int = 5) -> str:
    return ", ".join(tags[:most]) + (f" and {len(tags) - most} more" if len(tags) > most else "")


def _later_dead(story: Story) -> str:
    """A newer event that was refused means that what is found is not the newest version. One that was replayed since
    is no dead letter any more: had it failed again, it would be another letter. A dismissed one was judged harmless."""
    later = _later(story)
    return f"; a later event is a dead letter ({later.code}), so this is not its newest version" if later else ""


def _later(story: Story) -> DeadLetter | None:
    last_event = max((e.at for e in story.events), default=None)
    later = [d for d in story.dead if d.waits and (last_event is None or d.at > last_event)]
    return later[-1] if later else None


def _replay(story: Story) -> str | None:
    later = _later(story)
    return f"mend what is wrong, then `penstock dead replay {quote(later.id)}`" if later else None


def _notes(story: Story, around: Around) -> list[str]:
    """What is true beside the verdict."""
    notes = []
    document, source = story.document, around.source
    if document is not None and story.events and story.events[-1].outcome == "stale":
        last = story.events[-1]
        notes.append(
            f"its newest event (version {last.version}, arrived {moment(last.at)}) was stale: older than what was known"
        )
    if around.superseded:
        notes.append(
            f"version {', '.join(map(str, around.superseded))} was observed later, but lost to version"
            f" {document.version if document else '?'}: the greater version wins"
        )
    if document is not None and source is not None:
        notes += _of_source(document.version, document.alive, source, around)
    for generation in story.generations:
        stores = (generation.vectors, generation.keywords)
        active = story.active
        if generation.active or not generation.chunks or active is None:
            continue
        if all(s.reached for s in stores) and not (active.vectors.reached and active.keywords.reached):
            notes.append(f"generation {generation.name} ({generation.state}) holds it, but queries use {active.name}")
    for h in around.held or ():
        if h.kind not in BREAKS or (story.active is not None and h.generation != story.active.name):
            notes.append(f"{h.generation}, {h.store}: {h.meaning}; no query shows that (`penstock audit --repair`)")
    return notes


def _of_source(version: int | None, alive: bool, source: Source, around: Around) -> list[str]:
    notes = []
    item = source.item
    if item is not None and item.problem_code is not None:
        notes.append(
            f"as it is now, {source.speaker} cannot publish it ({item.problem_code}: {item.problem_message}):"
            " what the stores hold is older"
        )
    elif (
        item is not None and item.version is not None and not item.gone and (version is None or item.version > version)
    ):
        queue = around.queue("detect")
        where = f": {queue.behind} records to take in partition {queue.partition} of {queue.topic}" if queue else ""
        notes.append(f"version {item.version} was published and is not taken in yet{where}")
    elif item is not None and item.gone and alive:
        notes.append(f"{source.speaker} has published its delete, which is not taken in yet")
    if source.held_back and alive:
        guard = source.guard or {}
        notes.append(
            f"the sweep of {moment(datetime.fromisoformat(str(guard['at'])))} no longer listed it and wanted to delete"
            f" {guard.get('missing')} of {guard.get('published')} documents: held back until"
            f" `penstock connector run {quote(source.name)} --allow-mass-delete`"
        )
    if source.state == "paused":
        notes.append(
            f"connector {source.name} is paused: newer changes come after"
            f" `penstock connector resume {quote(source.name)}`"
        )
    elif source.state == "not running":
        notes.append(
            f"connector {source.name} does not run, so newer changes are not seen: `penstock worker connectors`"
        )
    elif source.state == "failing":
        notes.append(f"connector {source.name} cannot read its source at present ({source.trouble})")
    return notes
