"""What was found wrong with an answer, and whether somebody should look at it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from query.answers.model import Numbered, Reason
from query.answers.support import Verdict, examine
from query.answers.written import Found

REVIEW_SUPPORT = 0.8
"""An answer whose claims are supported to a smaller share is looked at …"""
REVIEW_DENSITY = 0.5
"""… and one of whose claims fewer carry a citation."""

NOTHING = Verdict(0, (), 0)


@dataclass(frozen=True, slots=True)
class Judged:
    verdict: Verdict
    grounded: bool
    reasons: Sequence[Reason]
    notes: Sequence[str]


def judge(text: str, found: Found, passages: Sequence[Numbered]) -> Judged:
    """text: as it is shown."""
    verdict = examine(text, {p.n: evidence(p) for p in passages})
    notes = []
    if bad := len(found.bad_citations):
        notes.append(f"{bad} {'citation' if bad == 1 else 'citations'} of no passage taken out of the answer")
    if found.removed:
        notes.append("images, links or markup taken out of the answer")
    return Judged(verdict, bool(found.cited) and not verdict.unsupported, why_review(verdict, found), notes)


def evidence(passage: Numbered) -> str:
    """What a claim is held to: the text, with what stands above it."""
    place = passage.result.passage
    above = [place.title or place.external_id, *passage.result.headings]
    return "\n\n".join([*above, passage.text])


def why_review(verdict: Verdict, found: Found) -> list[Reason]:
    checks: dict[Reason, bool] = {
        "unsupported": verdict.support < REVIEW_SUPPORT,
        "uncited": verdict.density < REVIEW_DENSITY,
        "bad_citation": bool(found.bad_citations),
        "active_content": bool(found.removed),
    }
    return [reason for reason, holds in checks.items() if holds]
