"""Whether the passages that a sentence cites say what it says: by words, numbers and names. Pure.

A claim is supported when enough of its words stand close together in what it cites, and all of its numbers and nearly
all of its names stand there too. The thresholds were chosen on the hand-made pairs of
tests/unit/query/answers/test_support.py, which is a small set. What this cannot see: a paraphrase in words of its own
(taken for unsupported: the answer goes to review), a true sentence turned round in the same words (taken for supported,
except for a negation), and an answer in another language than its passages. It decides what people look at, nothing
else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from query.answers.model import NO_INFORMATION, Numbered, Reason
from query.answers.sentences import Said, read, sentences, share, together
from query.answers.writing import Found

ENOUGH_WORDS = 0.6
"""Share of a claim's words that must stand in the best stretch of each passage it cites, taken together."""
ENOUGH_NAMES = 0.75
NEARLY_THE_SAME = 0.75
"""Share of words, both ways, from which a negation on one side only is a contradiction and no accident."""
STRETCH = 3
"""Neighbouring sentences that are read together."""
LEAST_WORDS = 3
"""A sentence with fewer claims nothing that could be checked, unless it has a number or a name."""

_CITATION = re.compile(r"\[(\d+)\]")
_FENCED = re.compile(r"^ {0,3}(`{3,12}|~{3,12})[^\n]*\n.*?(?:^ {0,3}\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"^(?:[-*+•>|\s]|\d{1,3}[.)]\s)+")
"""A list's marks are no numbers that a passage would have to say."""
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t][^\n]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the answer that says something that can be checked."""

    text: str
    """Without its citations."""
    cites: tuple[int, ...]
    own: bool
    """Whether the citations stand in it; else they are those of its paragraph."""


@dataclass(frozen=True, slots=True)
class Verdict:
    claims: int
    unsupported: Sequence[str]
    cited: int
    """Claims with a citation of their own."""

    @property
    def support(self) -> float:
        """1.0 where nothing is claimed."""
        return 1 - len(self.unsupported) / self.claims if self.claims else 1.0

    @property
    def density(self) -> float:
        return self.cited / self.claims if self.claims else 1.0


class Evidence:
    """A passage, read once for all claims."""

    def __init__(self, text: str) -> None:
        self.sentences = [read(sentence) for sentence in sentences(text)]
        self.all = together(*self.sentences)
        self._stretches = [
            together(*self.sentences[at : at + STRETCH]) for at in range(max(1, len(self.sentences) - STRETCH + 1))
        ]

    def best(self, said: Said) -> Said:
        return max(self._stretches, key=lambda s: len(said.words & s.words))

    def contradicts(self, said: Said) -> bool:
        """It says nearly the same words, with a negation on one side only."""
        close = [
            s
            for s in self.sentences
            if share(said.words, s.words) >= NEARLY_THE_SAME and share(s.words, said.words) >= NEARLY_THE_SAME
        ]
        return bool(close) and all(s.negated != said.negated for s in close)


def examine(answer: str, passages: Mapping[int, str]) -> Verdict:
    """passages: by the numbers that the answer cites them with, each with its title in front."""
    claims = claims_of(answer)
    needed = {n for claim in claims for n in claim.cites}
    evidence = {n: Evidence(text) for n, text in passages.items() if n in needed}
    unsupported = [claim.text for claim in claims if not supported(claim, evidence)]
    return Verdict(len(claims), unsupported, sum(claim.own for claim in claims))


def claims_of(answer: str) -> list[Claim]:
    """Sentences without a citation are held to those of their paragraph. Code and headings claim nothing."""
    claims = []
    for paragraph in re.split(r"\n\s*\n", _HEADING.sub("", _FENCED.sub("\n\n", answer))):
        around = cites(paragraph)
        for sentence in sentences(paragraph):
            text = re.sub(r"\s+([.,;:!?])", r"\1", " ".join(_CITATION.sub("", sentence).split()))
            text = _ITEM.sub("", text).strip()
            if says_something(text):
                own = cites(sentence)
                claims.append(Claim(text, own or around, bool(own)))
    return claims


def cites(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(n) for n in _CITATION.findall(text)))


def says_something(text: str) -> bool:
    """Not so: questions, what introduces a list, and that there is no information."""
    if text.endswith(("?", ":")) or is_no_information(text):
        return False
    said = read(text)
    return len(said.words) >= LEAST_WORDS or bool(said.numbers or said.names)


def is_no_information(text: str) -> bool:
    """The sentence that the model is told to say, perhaps with another apostrophe or a citation behind it."""

    def plain(words: str) -> str:
        return re.sub(r"[^\w ]", "", _CITATION.sub("", words).lower()).strip()

    return plain(text) in (plain(NO_INFORMATION), plain("I do not have information on this"))


def supported(claim: Claim, evidence: Mapping[int, Evidence]) -> bool:
    said = read(claim.text)
    cited = [evidence[n] for n in claim.cites if n in evidence]
    if not cited:
        return False
    near = together(*(passage.best(said) for passage in cited))
    anywhere = together(*(passage.all for passage in cited))
    return (
        share(said.words, near.words) >= ENOUGH_WORDS
        and said.numbers <= anywhere.numbers
        and share(said.names, anywhere.words) >= ENOUGH_NAMES
        and not any(passage.contradicts(said) for passage in cited)
    )


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
