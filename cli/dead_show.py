"""Dead letters for people and for programs: a table, one letter whole, and both as JSON."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cli.output import printable, stdout

if TYPE_CHECKING:
    from pipeline.ledger.letters import Letter, TrailEntry
    from pipeline.ledger.skipped import Skipped
    from pipeline.stages.replay import Result
    from topics.letters import Letter as Sealed

HEADER_CHARACTERS = 200
"""Characters of one header's value, on a terminal."""


def letter_json(letter: Letter) -> dict[str, Any]:
    """The ledger's entry of a letter; times in ISO 8601."""
    return {
        "id": letter.id,
        "at": letter.at.isoformat(),
        "stage": letter.stage,
        "code": letter.code,
        "message": letter.message,
        "document_id": str(letter.document_id) if letter.document_id else None,
        "tenant": letter.tenant,
        "source": letter.source,
        "external_id": letter.external_id,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "value_bytes": letter.value_bytes,
        "letter": _place(letter.letter_partition, letter.letter_offset),
        "attempt": letter.attempt,
        "first_failed_at": letter.first_failed_at.isoformat(),
        "replay_of": letter.replay_of,
        "replayed_at": letter.replayed_at.isoformat() if letter.replayed_at else None,
        "replayed_to": _place(letter.replayed_partition, letter.replayed_offset),
        "superseded_by": letter.superseded_by,
        "dismissed": None
        if letter.dismissed_at is None
        else {"at": letter.dismissed_at.isoformat(), "by": letter.dismissed_by, "reason": letter.dismissed_reason},
    }


def judged_json(entry: TrailEntry) -> dict[str, Any]:
    return {"at": entry.at.isoformat(), "action": entry.action, "by": entry.by, "reason": entry.reason}


def record_json(sealed: Sealed, *, value: bool) -> dict[str, Any]:
    """The original record: bytes as {"text": …}, {"base64": …} where they are no UTF-8, None where there are none."""
    shown = {
        "key": _bytes_json(sealed.record.key),
        "headers": [{"name": name, **(_bytes_json(content) or {})} for name, content in sealed.record.headers],
        "omitted": sealed.omitted,
    }
    return {**shown, "value": _bytes_json(sealed.record.value)} if value else shown


def result_json(result: Result) -> dict[str, Any]:
    stored, letter = result.stored, result.letter
    return {
        "id": result.id,
        "replayed": stored is not None,
        "settled": result.settled,
        "topic": letter.topic if letter else None,
        "partition": stored.partition if stored else None,
        "offset": stored.offset if stored else None,
        "reason": result.reason,
    }


def show_table(letters: Sequence[Letter]) -> None:
    rows = [
        (
            printable(letter.id),
            f"{letter.at.astimezone():%Y-%m-%d %H:%M:%S}",
            letter.stage,
            letter.code,
            printable(_document(letter)),
            printable(_remark(letter) + letter.message),
        )
        for letter in letters
    ]
    header = ("ID", "WHEN", "STAGE", "CODE", "DOCUMENT", "MESSAGE")
    widths = [max(len(row[n]) for row in [header, *rows]) for n in range(len(header) - 1)]
    for row in [header, *rows]:
        line = "  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]])
        if stdout.is_terminal and len(line) > stdout.width:
            line = line[: stdout.width - 1] + "…"
        stdout.print(Text(line, style="bold" if row is header else ""), soft_wrap=True)


def show_skipped(documents: Sequence[Skipped], total: int) -> None:
    if not documents:
        return
    stdout.print(
        f"{total} documents cannot be read at their source,"
        f" {len(documents)} shown (`penstock why DOCUMENT` explains one):",
        soft_wrap=True,
        markup=False,
    )
    for document in documents:
        older = "; its searchable content is older" if document.older else ""
        name = f"{document.tenant}/{document.source}  {document.external_id}"
        line = f"  {name}: {document.code}: {document.message}{older}"
        stdout.print(Text(printable(line)), soft_wrap=True)


def show_letter(letter: Letter, trail: Sequence[TrailEntry], sealed: Sealed | None, missing: str | None) -> None:
    """missing: why there is no ``sealed``."""

    def line(name: str, text: str, style: str = "") -> None:
        stdout.print(Text.assemble((f"{name:<11}", "dim"), (printable(text), style)), soft_wrap=True)

    line("id", letter.id, "bold")
    line("why", f"{letter.code}: {letter.message}", "red")
    again = f", first on {letter.first_failed_at.astimezone():%Y-%m-%d %H:%M:%S}" if letter.attempt > 1 else ""
    line("failed", f"{letter.at.astimezone():%Y-%m-%d %H:%M:%S} in {letter.stage}, attempt {letter.attempt}{again}")
    if letter.replay_of:
        line("", f"as the replay of {letter.replay_of}")
    line("document", _document(letter) + (f"  {letter.document_id}" if letter.document_id else ""))
    line("record", f"{letter.topic}, partition {letter.partition}, offset {letter.offset}")
    if letter.replayed_at:
        line("replayed", f"{letter.replayed_at.astimezone():%Y-%m-%d %H:%M:%S} {_replayed_where(letter)}")
        if letter.superseded_by:
            line("", f"failed again: {letter.superseded_by}", "red")
    for n, judgement in enumerate(trail):
        said = f": {judgement.reason}" if judgement.reason else ""
        done = "dismissed" if judgement.action == "dismissed" else "dismissal undone"
        at = judgement.at.astimezone()
        line("decided" if n == 0 else "", f"{at:%Y-%m-%d %H:%M:%S} {done} by {judgement.by}{said}")
    if sealed is None:
        line("bytes", missing or "", "yellow")
        return
    size = "no value" if letter.value_bytes is None else f"{letter.value_bytes} bytes (--value prints them)"
    omitted = "; ".join(f"{part} not stored: {what}" for part, what in sealed.omitted.items())
    line("value", omitted or size, "yellow" if omitted else "")
    line("key", _readable(sealed.record.key))
    for n, (name, content) in enumerate(sealed.record.headers):
        line("headers" if n == 0 else "", f"{name}: {_readable(content)}")


def _replayed_where(letter: Letter) -> str:
    if letter.replayed_offset is None:
        return "(not sent: the ledger had something newer)"
    return f"to {letter.topic}, partition {letter.replayed_partition}, offset {letter.replayed_offset}"


def _document(letter: Letter) -> str:
    if letter.external_id is None:
        return "?"
    return f"{letter.tenant}/{letter.source}/{letter.external_id}"


def _remark(letter: Letter) -> str:
    if letter.superseded_by:
        return "[replayed, failed again] "
    if letter.replayed_at:
        return "[replayed] "
    if letter.dismissed_at:
        return f"[dismissed by {letter.dismissed_by}: {letter.dismissed_reason}] "
    return f"[attempt {letter.attempt}] " if letter.attempt > 1 else ""


def _place(partition: int | None, offset: int | None) -> dict[str, int] | None:
    return None if partition is None or offset is None else {"partition": partition, "offset": offset}


def _bytes_json(content: bytes | None) -> dict[str, str] | None:
    if content is None:
        return None
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _readable(content: bytes | None) -> str:
    if content is None:
        return "(none)"
    text = content.decode("utf-8", "replace")
    return text if len(text) <= HEADER_CHARACTERS else f"{text[:HEADER_CHARACTERS]}… ({len(content)} bytes)"
