"""Why the ledger has never accepted a document, and what would change that. Pure."""

from __future__ import annotations

from datetime import datetime
from shlex import quote
from typing import Literal

from pipeline.ledger.story_origin import Source
from pipeline.ledger.story_shape import Around, Story

Absent = Literal[
    "unknown", "refused", "source_paused", "source_failing", "source_not_running", "source_loading", "queued", "lost",
    "dead_letter", "dismissed", "replayed",
]  # fmt: skip
Told = tuple[Absent, str, str | None]
"""State, sentence, next step."""

MENDING = {
    "too_large": "make it smaller at the source, or split it",
    "needs_ocr": "it holds pictures of text: put a version with text at the source",
    "encrypted": "put a version without a password at the source",
    "unsupported": "put a version in a format that is read at the source (docs/connectors)",
    "permission": "let the connector's account read it at the source",
    "unconfined": "run the connectors where the kernel has Landlock and seccomp (docs/extraction.md)",
}
"""By the code of what a connector cannot read; of any other the message says enough."""
BY_HAND = {
    "too_large": "make it smaller, or split it",
    "needs_ocr": "recognise the text of its pictures first",
    "encrypted": "save it without a password",
    "unsupported": "convert it to a format that is read (docs/extraction.md)",
    "empty": "put text into it",
    "permission": "let whoever ingests read it",
    "unconfined": "ingest it where the kernel has Landlock and seccomp (docs/extraction.md)",
    "io_error": "mend the disk or the share that it is on",
    "changing": "let whatever writes it finish",
}
"""The same of a file that `penstock ingest` skipped."""


def absent(story: Story, around: Around) -> Told:
    """Of a document without a row in the ledger."""
    source = around.source
    if source is not None and source.item is not None and source.item.problem_code is not None:
        return _refused(source, around)
    if story.dead:
        return _dead(story)
    if source is not None and source.item is not None and source.item.version is not None and not source.item.gone:
        return _published(source, around)
    if source is not None and source.item is not None and source.item.gone:
        return (
            "unknown",
            f"{source.speaker} published its delete before the ledger heard of its content",
            _read_again(source, around),
        )
    if source is not None and not source.by_hand:
        return _of_source(source, around)
    reason = "no event about it has ever arrived"
    if around.others:
        told = ", ".join(f"{one.name} ({one.state})" for one in around.others)
        return (
            "unknown",
            f"{reason}; these connectors of the tenant do not follow their source at present: {told}",
            "penstock connector status",
        )
    return "unknown", reason, "penstock ingest PATH, or penstock connector list: is its source connected?"


def _refused(source: Source, around: Around) -> Told:
    item = source.item
    assert item is not None
    code = item.problem_code or ""
    step = MENDING.get(code, "mend it at the source")
    if source.by_hand:
        return (
            "refused",
            f"`penstock ingest` skipped it when it last read it on {moment(item.seen_at)}"
            f" ({code}: {item.problem_message})",
            f"{BY_HAND.get(code, 'save it anew, or convert it')}; then `{_read_again(source, around)}`",
        )
    return (
        "refused",
        f"connector {source.name} cannot publish it as it is ({code}: {item.problem_message})",
        f"{step}; the connector sees it at its next look (or run `{_read_again(source, around)}`)",
    )


def _read_again(source: Source, around: Around) -> str:
    if source.by_hand and source.item is not None:
        return f"penstock ingest {quote(source.item.external_id)}"
    name = source.item.external_id if source.item is not None else around.name
    return f"penstock connector run {quote(source.name)} --document {quote(name or 'EXTERNAL_ID')}"


def _published(source: Source, around: Around) -> Told:
    item, queue = source.item, around.queue("detect")
    assert item is not None
    told = f"{source.speaker} published version {item.version} of it"
    if item.content_at is not None:
        told += f" on {moment(item.content_at)}"
    if queue is None:
        return "queued", f"{told}, and it has not been taken in yet: is the detect worker running?", "penstock status"
    if not queue.members:
        return "queued", f"{told}, and no detect worker runs to take it in", "penstock worker detect"
    if queue.behind:
        where = f"{queue.behind} records of partition {queue.partition} of {queue.topic}"
        if trouble := around.trouble.get("detect"):
            return "queued", f"{told}; detect has yet to take {where} and stands still: {trouble}", "penstock status"
        return "queued", f"{told}; detect has yet to take {where}, this one among them", "penstock status"
    return (
        "lost",
        f"{told}, and detect has taken everything of its partition without it: the ledger is older than the table"
        " of what was published, as after a restore",
        f"penstock recover --since TIME, or {_read_again(source, around)}",
    )


def _of_source(source: Source, around: Around) -> Told:
    name = quote(source.name)
    last = f"; it last answered on {_said(source.asked_at)}" if source.asked_at else ""
    match source.state:
        case "paused":
            return (
                "source_paused",
                f"no event about it has ever arrived, and connector {source.name} is paused{last}",
                f"penstock connector resume {name}",
            )
        case "not running":
            return (
                "source_not_running",
                f"no event about it has ever arrived, and nothing runs connector {source.name}{last}",
                "penstock worker connectors",
            )
        case "failing":
            return (
                "source_failing",
                f"no event about it has ever arrived, and connector {source.name} cannot read its source"
                f" ({source.trouble}){last}",
                f"penstock connector check {name}",
            )
        case "loading":
            return (
                "source_loading",
                f"connector {source.name} is in its first load and has not come to it yet",
                f"penstock connector status {name}",
            )
        case _:
            return (
                "unknown",
                f"connector {source.name} follows its source and has never seen it{last}: it does not exist there under"
                " this id, a rule leaves it out, or the connector's account may not see it",
                _read_again(source, around),
            )


def _dead(story: Story) -> Told:
    waiting = [d for d in story.dead if d.waits]
    if waiting:
        last = waiting[-1]
        return (
            "dead_letter",
            f"its only events are dead letters, the last one at {moment(last.at)} ({last.code}: {last.message}):"
            f" mend and publish it again, or `penstock dead replay {last.id}`",
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
