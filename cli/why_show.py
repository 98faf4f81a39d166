"""One document's story for people: the verdict, the next step, what it follows from, and the history."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from rich.text import Text

from cli.output import printable, stdout
from pipeline.diagnosis.story_model import Context, Source, StoreProgress, Story
from pipeline.diagnosis.story_verdict import Verdict

WIDTH = 12
"""Width of the column of names, in characters."""
COLOURS = {"settled": "green", "partial": "yellow", "pending": "yellow", "failed": "red", "withdrawn": "dim"}
MAX_CURSOR_CHARACTERS = 120

Part = str | tuple[str, str]


def show(story: Story, context: Context, verdict: Verdict) -> None:
    document = story.document
    title = (document.title or document.identity.external_id) if document else (context.name or "?")
    mark: Part = ("searchable", "bold green") if verdict.searchable else ("not searchable", "bold red")
    if verdict.state == "unreadable":
        mark = ("searchable, but not readable by them", "bold yellow")
    _line((title, "bold"), "  ", mark)
    _line(f"  {verdict.reason}")
    if verdict.next:
        _named("next", (verdict.next, "cyan"))
    for note in verdict.notes:
        _named("note", (note, "yellow"))
    if document is not None:
        identity = document.identity
        _named("document", f"{identity.tenant}/{identity.source}/{identity.external_id}")
        _named("", f"{identity.id}  version {document.version}  seq {document.seq}")
        if document.source_url:
            _named("", document.source_url)
        required = f"  and all of {', '.join(story.access.required_tags)}" if story.access.required_tags else ""
        known = f"  as of {_at(story.access.observed_at)}" if story.access.observed_at else ""
        _named("access", (", ".join(story.access.acl_tags) or "nobody") + required, (known, "dim"))
    _person(context)
    if (rank := context.query_rank) is not None:
        ranks = ", ".join(f"{ranker} #{n}" for ranker, n in rank.ranks.items() if n)
        answer = f"found at rank {rank.rank} of {rank.of} ({ranks})" if rank.rank else f"not found: {rank.reason}"
        _named("query", f"“{rank.query}”: {answer}")
    for g in story.generations:
        _named(g.name, f"{g.chunks} chunks{'' if g.active else f'  ({g.state})'}")
        for name, progress in (("vectors", g.vectors), ("keywords", g.keywords)):
            _named("", f"{name:<9} ", (progress.state, COLOURS[progress.state]), _detail(progress))
    if context.differences is not None and story.document is not None:
        held = "; ".join(f"{h.generation} {h.store}: {h.kind}" for h in context.differences)
        _named("stores", (held, "red") if held else "agree with the ledger")
    for queue in context.queues:
        if queue.behind or not queue.members:
            _named(
                "queue",
                f"{queue.stage}: {queue.behind} records in partition {queue.partition} of {queue.topic},"
                f" {queue.members} workers",
            )
    if context.source is not None:
        _source(context.source)
    for n, (at, parts) in enumerate(sorted(_history(story), key=lambda entry: entry[0])):
        _named("history" if n == 0 else "", f"{_at(at)}  ", *parts)


def _line(*parts: Part) -> None:
    clean = [printable(p) if isinstance(p, str) else (printable(p[0]), p[1]) for p in parts]
    stdout.print(Text.assemble(*clean), soft_wrap=True)


def _named(name: str, *parts: Part) -> None:
    _line((f"  {name:<{WIDTH - 2}}", "dim"), *parts)


def _person(context: Context) -> None:
    person = context.person
    if person is None:
        return
    who = " and ".join(person.names)
    if person.may_read:
        answer = f"{who}: yes, with {', '.join(person.by)}"
    elif not person.by:
        answer = f"{who}: no, holds none of its access tags"
    else:
        answer = f"{who}: no, lacks {', '.join(person.lacks)}"
    _named("may read", answer)
    for source, principal, at in person.memberships:
        _named("", (f"{principal}'s groups in {source} as of {_at(at)}", "dim"))


def _source(source: Source) -> None:
    if source.by_hand:
        _named("published", "by `penstock ingest` or `penstock watch`; no connector follows it")
    else:
        answered = (
            f", last success {source.last_success_at[:19].replace('T', ' ')}"
            if source.last_success_at
            else ", no success yet"
        )
        trouble = f" ({source.problem})" if source.problem else ""
        _named("connector", f"{source.name} ({source.kind}): {source.state}{trouble}{answered}")
    item = source.item
    if item is not None:
        published = "its deletion was published" if item.gone else f"version {item.version} was published"
        if item.version is None:
            published = "was never published"
        problem = f"; {item.problem_code}: {item.problem_message}" if item.problem_code else ""
        requested = f"read at {_at(item.content_at)}, " if item.content_at else ""
        _named("", f"{published}; {requested}last seen {_at(item.seen_at)}{problem}")
    if item is not None and item.difference is not None and item.difference_at is not None:
        again = "it will be published again" if item.in_doubt_since else "it was published again"
        _named("", (f"differed from the ledger ({item.difference}) at {_at(item.difference_at)}: {again}", "yellow"))
    if source.cursor is not None:
        cursor = str(source.cursor)
        _named(
            "", (f"cursor {cursor[:MAX_CURSOR_CHARACTERS]}{'…' if len(cursor) > MAX_CURSOR_CHARACTERS else ''}", "dim")
        )


def _history(story: Story) -> Iterator[tuple[datetime, list[Part]]]:
    for e in story.events:
        seq = f"  seq {e.seq}" if e.seq else ""
        version = f"  version {e.version}" if e.version is not None else ""
        observed = f"  observed {_at(e.observed_at)}" if e.observed_at else ""
        yield e.at, [f"{e.kind}  {e.outcome}{version}{seq}", (f"{observed}  {e.lane}", "dim")]
    for d in story.dead:
        again = f"  attempt {d.attempt}" if d.attempt > 1 else ""
        yield d.at, [(f"dead letter {d.id}  {d.code}: {d.message}{again}", "red" if d.is_open else "dim")]
        if d.replayed_at is not None:
            yield d.replayed_at, [f"replayed    {d.id}"]
        if d.dismissed_at is not None:
            yield d.dismissed_at, [f"dismissed   {d.id} by {d.dismissed_by}: {d.dismissed_reason}"]
    if story.active is not None:
        for name, progress in (("vectors", story.active.vectors), ("keywords", story.active.keywords)):
            if progress.at is not None:
                yield progress.at, [f"{name} reached seq {progress.seq}"]


def _detail(progress: StoreProgress) -> str:
    parts = [f"seq {progress.seq}" + (f" of {progress.want_seq}" if not progress.reached else "")]
    if progress.reached and progress.at:
        parts.append(f"since {_at(progress.at)}")
    if progress.pending_since:
        parts.append(f"waiting since {_at(progress.pending_since)}")
    if progress.before:
        parts.append(f"{progress.before} documents before it")
    if progress.attempts:
        parts.append(f"{progress.attempts} attempts")
    if progress.next_retry:
        parts.append(f"next {_at(progress.next_retry)}")
    if progress.error:
        parts.append(progress.error)
    return "  " + ", ".join(parts)


def _at(at: datetime | None) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S}" if at else "?"
