"""Whether cited passages support a sentence, by words, numbers and names. Pure.

A claim is supported if enough of its words are close together in the passages that it cites, which must also contain
all of its numbers and nearly all of its names. The thresholds were chosen on the hand-made pairs of
tests/unit/query/answers/test_support.py, which is a small set. It does not recognise a free paraphrase (counted as
unsupported, so that the answer goes to review), a true sentence reversed in the same words (counted as supported,
except for a negation), or an answer in another language than its passages. It only decides which answers people review.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.core.sentences import sentences
from query.answers.model import NO_INFORMATION, NumberedPassage, Reason
from query.answers.sentences import Terms, overlap, terms_of, union_terms
from query.answers.writing import Findings

MIN_WORD_SHARE = 0.6
"""The share of a claim's words that the best windows of all cited passages together must contain."""
MIN_NAME_SHARE = 0.75
CONTRADICTION_SIMILARITY = 0.75
"""The share of common words, in both directions, from which a negation on one side only is a contradiction."""
WINDOW_SENTENCES = 3
"""The number of adjacent sentences that form a window."""
MIN_CLAIM_WORDS = 3
"""The fewest words of a sentence that is checked, unless it contains a number or a name."""

_CITATION = re.compile(r"\[(\d+)\]")
_FENCED = re.compile(r"^ {0,3}(`{3,12}|~{3,12})[^\n]*\n.*?(?:^ {0,3}\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"^(?:[-*+•>|\s]|\d{1,3}[.)]\s)+")
"""List markers, which are not numbers that a passage must contain."""
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t][^\n]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the answer that can be checked."""

    text: str
    """The sentence without its citations."""
    cites: tuple[int, ...]
    own: bool
    """Whether the sentence itself has the citations; else they are those of its paragraph."""


@dataclass(frozen=True, slots=True)
class Verdict:
    claims: int
    unsupported: Sequence[str]
    cited: int
    """How many claims have a citation of their own."""

    @property
    def support(self) -> float:
        """The share of supported claims; 1.0 without claims."""
        return 1 - len(self.unsupported) / self.claims if self.claims else 1.0

    @property
    def density(self) -> float:
        return self.cited / self.claims if self.claims else 1.0


class Evidence:
    """A passage, analysed once for all claims."""

    def __init__(self, text: str) -> None:
        self.sentences = [terms_of(sentence) for sentence in sentences(text)]
        self.all = union_terms(*self.sentences)
        self._windows = [
            union_terms(*self.sentences[at : at + WINDOW_SENTENCES])
            for at in range(max(1, len(self.sentences) - WINDOW_SENTENCES + 1))
        ]

    def best(self, said: Terms) -> Terms:
        return max(self._windows, key=lambda s: len(said.words & s.words))

    def contradicts(self, said: Terms) -> bool:
        """Whether a sentence has nearly the same words, with a negation on one side only."""
        close = [
            s
            for s in self.sentences
            if overlap(said.words, s.words) >= CONTRADICTION_SIMILARITY
            and overlap(s.words, said.words) >= CONTRADICTION_SIMILARITY
        ]
        return bool(close) and all(s.negated != said.negated for s in close)


def examine(answer: str, passages: Mapping[int, str]) -> Verdict:
    """Check every claim of an answer. passages: the texts by the numbers of their citations, each with its title in
    front."""
    claims = claims_of(answer)
    needed = {n for claim in claims for n in claim.cites}
    evidence_text = {n: Evidence(text) for n, text in passages.items() if n in needed}
    unsupported = [claim.text for claim in claims if not is_supported(claim, evidence_text)]
    return Verdict(len(claims), unsupported, sum(claim.own for claim in claims))


def claims_of(answer: str) -> list[Claim]:
    """The claims of an answer. A sentence without citations has those of its paragraph. Code and headings are not
    claims."""
    claims = []
    for paragraph in re.split(r"\n\s*\n", _HEADING.sub("", _FENCED.sub("\n\n", answer))):
        around = cites(paragraph)
        for sentence in sentences(paragraph):
            text = re.sub(r"\s+([.,;:!?])", r"\1", " ".join(_CITATION.sub("", sentence).split()))
            text = _ITEM.sub("", text).strip()
            if is_checkable(text):
                own = cites(sentence)
                claims.append(Claim(text, own or around, bool(own)))
    return claims


def cites(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(n) for n in _CITATION.findall(text)))


def is_checkable(text: str) -> bool:
    """Whether a sentence can be checked: not questions, introductions of lists, and NO_INFORMATION."""
    if text.endswith(("?", ":")) or is_no_information(text):
        return False
    said = terms_of(text)
    return len(said.words) >= MIN_CLAIM_WORDS or bool(said.numbers or said.names)


def is_no_information(text: str) -> bool:
    """Whether a text is NO_INFORMATION, possibly with another apostrophe or a citation."""

    def plain(words: str) -> str:
        return re.sub(r"[^\w ]", "", _CITATION.sub("", words).lower()).strip()

    return plain(text) in (plain(NO_INFORMATION), plain("I do not have information on this"))


def is_supported(claim: Claim, evidence_text: Mapping[int, Evidence]) -> bool:
    said = terms_of(claim.text)
    cited = [evidence_text[n] for n in claim.cites if n in evidence_text]
    if not cited:
        return False
    near = union_terms(*(passage.best(said) for passage in cited))
    anywhere = union_terms(*(passage.all for passage in cited))
    return (
        overlap(said.words, near.words) >= MIN_WORD_SHARE
        and said.numbers <= anywhere.numbers
        and overlap(said.names, anywhere.words) >= MIN_NAME_SHARE
        and not any(passage.contradicts(said) for passage in cited)
    )


REVIEW_SUPPORT = 0.8
"""An answer with a smaller share of supported claims is reviewed."""
REVIEW_DENSITY = 0.5
"""An answer with a smaller share of claims that have citations is reviewed."""

NOTHING = Verdict(0, (), 0)


@dataclass(frozen=True, slots=True)
class SupportReport:
    verdict: Verdict
    grounded: bool
    reasons: Sequence[Reason]
    notes: Sequence[str]


def check_answer(text: str, findings: Findings, passages: Sequence[NumberedPassage]) -> SupportReport:
    """The checks of an answer. text: the answer as it is returned."""
    verdict = examine(text, {p.n: evidence_text(p) for p in passages})
    notes = []
    if bad := len(findings.bad_citations):
        noun = "citation" if bad == 1 else "citations"
        notes.append(f"{bad} {noun} of no existing passage removed from the answer")
    if findings.removed:
        notes.append("images, links or markup removed from the answer")
    return SupportReport(
        verdict, bool(findings.cited) and not verdict.unsupported, review_reasons(verdict, findings), notes
    )


def evidence_text(passage: NumberedPassage) -> str:
    """The text that claims are checked against: the passage with its title and headings."""
    place = passage.result.passage
    above = [place.title or place.external_id, *passage.result.headings]
    return "\n\n".join([*above, passage.text])


def review_reasons(verdict: Verdict, findings: Findings) -> list[Reason]:
    checks: dict[Reason, bool] = {
        "unsupported": verdict.support < REVIEW_SUPPORT,
        "uncited": verdict.density < REVIEW_DENSITY,
        "bad_citation": bool(findings.bad_citations),
        "active_content": bool(findings.removed),
    }
    return [reason for reason, holds in checks.items() if holds]
