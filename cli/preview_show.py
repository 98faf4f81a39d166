"""Output of a preview: lines for a terminal, and Markdown for the comment of a pull request. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cli.output import printable, printable_text

MAX_EXCERPT_CHARACTERS = 300
MAX_FINDINGS = 20
"""The most findings in a comment, which a code forge limits to 65,000 characters."""
HEADINGS = {
    "lost": "Answers that would be lost",
    "uncited": "Answers that would lose a citation",
    "contradicts": "Answers that would contradict another document",
    "changed": "Answers that would change",
}
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&])")
_ACTIVE = re.compile(r"@|#(?=\d)|:(?=//)|\bwww(?=\.)", re.IGNORECASE)
"""Text that a code forge makes a mention, a reference or a link of, escaped or not. A zero-width space prevents it."""

Report = Mapping[str, Any]


def as_text(report: Report) -> str:
    return "".join(f"{line}\n" for line in _text(report))


def _text(report: Report) -> Iterator[str]:
    for document in report["documents"]:
        yield f"{document['state']:<10} {printable(document['path'])}{_chunks(document)}"
    yield _summary(report)
    for finding in report["findings"]:
        yield ""
        yield f"{finding['kind']}: {printable(finding['question'])}{_whose(finding)}"
        for moved in finding["moved"]:
            yield f"  {_moved(moved)}"
        yield from (f"  {_contradiction(pair)}" for pair in finding["contradictions"])
        yield from (f"  - {_quoted(passage)}" for passage in _only(finding["before"], finding["after"]))
        yield from (f"  + {_quoted(passage)}" for passage in _only(finding["after"], finding["before"]))


def as_markdown(report: Report) -> str:
    return "".join(f"{line}\n" for line in _markdown(report))


def _markdown(report: Report) -> Iterator[str]:
    verdict = "answers would be lost" if report["fails"] else "no answer would be lost"
    yield f"### Preview of this edit: {verdict}"
    yield ""
    yield _escaped(_summary(report))
    shown = report["findings"][:MAX_FINDINGS]
    for kind, heading in HEADINGS.items():
        of_kind = [finding for finding in shown if finding["kind"] == kind]
        if of_kind:
            yield ""
            yield f"#### {heading}"
        for finding in of_kind:
            yield ""
            yield f"**{_escaped(finding['question'])}**{_whose(finding)}"
            yield ""
            for moved in finding["moved"]:
                yield f"- {_escaped(_moved(moved))}"
            for contradiction in finding["contradictions"]:
                yield f"- {_escaped(_contradiction(contradiction))}"
            for label, passages in (
                ("before", _only(finding["before"], finding["after"])),
                ("after", _only(finding["after"], finding["before"])),
            ):
                for passage in passages:
                    yield f"- {label}: {_escaped(_quoted(passage))}"
    if len(report["findings"]) > len(shown):
        yield ""
        yield f"{len(report['findings']) - len(shown)} more are in the output of `penstock preview --json`."
    yield ""
    yield "| document | state | new chunks | removed |"
    yield "|---|---|---|---|"
    for document in report["documents"]:
        path, state = _escaped(document["path"]), document["state"]
        yield f"| {path} | {state} | {document['new']} | {document['removed']} |"


def _whose(finding: Mapping[str, Any]) -> str:
    return " (standing question)" if finding.get("standing_id") else ""


def _summary(report: Report) -> str:
    counts = f"{_plural(report['questions'], 'question')}, {report['affected']} of them affected"
    unasked = f", {report['skipped']} not asked because the time was over" if report["skipped"] else ""
    return f"{counts}{unasked}; {_plural(report['embedded'], 'text')} embedded; {report['took_ms'] / 1000:.1f} s"


def _chunks(document: Mapping[str, Any]) -> str:
    return f"  {document['new']} new, {document['removed']} removed" if document["state"] != "unchanged" else ""


def _moved(moved: Mapping[str, Any]) -> str:
    words = f' "{_short(moved["anchor"])}"' if moved["anchor"] else ""
    after = "not found any more" if moved["after"] is None else f"now at rank {moved['after']}, not quoted"
    document = f"{printable(moved['source'])}/{printable(moved['external_id'])}"
    return f"{document}{words}: was at rank {moved['before']}, {after}"


def _contradiction(of: Mapping[str, Any]) -> str:
    return f"{of['kind']}: {_quoted(of['new'])} ≠ {_quoted(of['other'])}"


def _quoted(passage: Mapping[str, Any]) -> str:
    return f"{printable(passage['title'])}: {_short(passage['excerpt'])}"


def _only(of: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The passages that the other answer does not quote in the same words."""
    known = {(passage["document_id"], passage["excerpt"]) for passage in other}
    return [passage for passage in of if (passage["document_id"], passage["excerpt"]) not in known]


def _short(text: str) -> str:
    line = " ".join(printable_text(text).split())
    return line if len(line) <= MAX_EXCERPT_CHARACTERS else f"{line[: MAX_EXCERPT_CHARACTERS - 1]}…"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _escaped(text: str) -> str:
    """Text of documents as it is: no markup, link, image or mention."""
    return _SPECIAL.sub(r"\\\1", _ACTIVE.sub("\\g<0>\u200b", text))
