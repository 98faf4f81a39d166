"""Sentences and their words, approximately, in prose and Markdown. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from query.answers.model import NumberedPassage
from query.answers.visible import disarmed

_END = re.compile(
    r"[.!?…][\"'”’»)\]*_]*(?:[ \t]*\[\d+\])*(?=\s|\Z)"  # Latin, Greek, Cyrillic
    r"|[。！？][”’」』）]*(?:[ \t]*\[\d+\])*"
    r"|\n[ \t]*\n|\n(?=[ \t]*(?:[-*+•|]|\d{1,3}[.)])[ \t])|\Z"  # paragraphs, items of a list
)
_ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|etc|vs|cf|approx|nr|fig|sec|vol|inc|ltd|dr|mr|mrs|ms|prof|z\.b|d\.h|bzw|ca|pp)|\b(?-i:[A-Z])"
    r"|(?:^|\n)[ \t]*\d{1,3})\.$",
    re.IGNORECASE,
)


def sentence_ends(text: str) -> list[int]:
    """The position after each sentence with its closing quotes and citations; the last one is the end of the text."""
    ends: list[int] = []
    for end in _END.finditer(text):
        at = end.end()
        if end[0].startswith(".") and _is_abbreviation(text, end.start() + 1) and text[at : at + 40].lstrip():
            continue
        if at and (not ends or at > ends[-1]):
            ends.append(at)
    return ends


def _is_abbreviation(text: str, after: int) -> bool:
    return _ABBREVIATION.search(text[max(0, after - 12) : after]) is not None


def sentences(text: str) -> list[str]:
    """The sentences of a text, without surrounding white space and without empty ones."""
    starts = [0, *sentence_ends(text)]
    return [part for start, end in pairwise(starts) if (part := text[start:end].strip())]


NEGATIONS = frozenset(
    """not no never none neither nor without cannot nicht kein keine keinen nie ohne""".split()  # noqa: SIM905
)
COMMON = NEGATIONS | frozenset(
    """a about above according after again all also am an and any are as at be because been before being below between
    both but by can could did do does doing down during each either every few for from further had has have having he
    her here hers him his how however i if in into is it its itself just like may me might more most must my of off on
    once one only onto or other our out over own passage per same shall she should so some such than that the their
    them then there these they this those through thus to too under until up upon us use used uses using very via was we
    were what when where whether which while who whom whose why will with within would you your yours
    der die das den dem des ein eine einen einem einer und oder ist sind war wird werden mit von zu im am auf für aus
    bei nach als auch wie es er sie man sich dass""".split()  # noqa: SIM905
)
"""Words that occur in every text, in English and German."""
_NUMERALS = {
    word: str(n)
    for n, word in enumerate(
        """two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
        eighteen nineteen twenty""".split(),  # noqa: SIM905
        start=2,
    )
}
_ENDINGS = (
    "ations",
    "ation",
    "ments",
    "ment",
    "ingly",
    "edly",
    "ing",
    "ies",
    "ied",
    "ers",
    "ed",
    "er",
    "es",
    "ly",
    "s",
    "e",
    "y",
)
_WORD = re.compile(r"\w+(?:[.,:/_@+-]\w+)*[%°]?")
_NUMBER = re.compile(r"^\d[\d.,:/-]*(?:[a-z]{1,3}|[%°])?$")
_SHORT = re.compile(r"\b\w+n't\b", re.IGNORECASE)
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


@dataclass(frozen=True, slots=True)
class Terms:
    words: frozenset[str]
    """Stems of content words; in scripts without spaces between words (Chinese, Japanese), pairs of characters."""
    numbers: frozenset[str]
    names: frozenset[str]
    """The words that are identifiers, abbreviations or capitalised within a sentence."""
    negated: bool


def terms_of(text: str) -> Terms:
    text = text.replace("\u2019", "'")
    words: set[str] = set()
    numbers: set[str] = set()
    names: set[str] = set()
    tokens = [m[0] for m in _WORD.finditer(_SHORT.sub(" not ", text))]
    for n, token in enumerate(tokens):
        lower = token.lower()
        if _NUMBER.match(lower) or lower in _NUMERALS:
            numbers.add(_number(lower))
        elif runs := _CJK.findall(token):
            words.update(run[at : at + 2] for run in runs for at in range(max(1, len(run) - 1)))
        elif lower not in COMMON and (len(token) > 1 or token.isupper()):
            words.add(stem(lower))
            if _is_name(token, first=n == 0):
                names.add(stem(lower))
    negated = any(token.lower() in NEGATIONS for token in tokens)
    return Terms(frozenset(words), frozenset(numbers), frozenset(names), negated)


def union_terms(*several: Terms) -> Terms:
    nothing: frozenset[str] = frozenset()
    return Terms(
        nothing.union(*(s.words for s in several)),
        nothing.union(*(s.numbers for s in several)),
        nothing.union(*(s.names for s in several)),
        any(s.negated for s in several),
    )


def overlap(part: frozenset[str], whole: frozenset[str]) -> float:
    """The share of ``part`` that ``whole`` contains; 1 if ``part`` is empty."""
    return len(part & whole) / len(part) if part else 1.0


def stem(word: str) -> str:
    """An approximate stem, which is equal for most forms of a word."""
    if len(word) <= 4 or not word.isascii() or not word.isalpha():
        return word
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            cut = word[: -len(ending)]
            doubled = len(cut) > 3 and cut[-1] == cut[-2] and cut[-1] not in "aeiousl"
            return cut[:-1] if doubled else cut
    return word


def _is_name(token: str, *, first: bool) -> bool:
    inner = token[1:]
    shaped = any(c.isupper() or c.isdigit() or c == "_" for c in inner)
    return shaped or (token[0].isupper() and not first)


def _number(token: str) -> str:
    """A normal form of numbers: 1,000 and 1000, 3.0 and 3, ``three`` and 3 are equal."""
    token = _NUMERALS.get(token, token)
    token = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", token).rstrip(".,:/-")
    return re.sub(r"\.0+(?=\D|$)", "", token)


_HEADING = re.compile(r"#{1,6}\s")
MAX_QUOTED_PASSAGES = 5
MAX_QUOTATION_CHARACTERS = 480
"""The longest quotation."""


def quotations(
    question: str, passages: Sequence[NumberedPassage], *, ranked: bool
) -> tuple[str, list[NumberedPassage]]:
    """Markdown quotations with ``[n]`` of the excerpt of each passage that contains most of the question's words, and
    the quoted passages. ranked: the passages are ordered by relevance; else those with most of the words are quoted."""
    question_words = terms_of(question)
    quoted = [
        (passage, *excerpt(question_words, passage.text))
        for passage in (passages[:MAX_QUOTED_PASSAGES] if ranked else passages)
    ]
    quoted = sorted((q for q in quoted if q[2]), key=lambda q: 0 if ranked else -q[1])[:MAX_QUOTED_PASSAGES]
    return "\n\n".join(f"{_as_quotation(text)} [{p.n}]" for p, _, text in quoted), [p for p, _, _ in quoted]


def excerpt(question: Terms, text: str) -> tuple[int, str]:
    """The excerpt with most of the question's words, and how many it has. It consists of whole sentences if any are
    short enough."""
    text = disarmed(text)
    ends = [0, *sentence_ends(text)]
    # Each sentence is looked at once: hundreds of short ones fit into an excerpt.
    common = [_common(question, text[start:end]) for start, end in pairwise(ends)]
    best, stretch_, last = -1, "", 0
    for first in range(len(ends) - 1):
        last = max(last, first + 1)
        while last + 1 < len(ends) and ends[last + 1] - ends[first] <= MAX_QUOTATION_CHARACTERS:
            last += 1
        hits = len(_NOTHING.union(*common[first:last]))
        if hits > best:
            best, stretch_ = hits, text[ends[first] : ends[last]].strip()
    if len(stretch_) > MAX_QUOTATION_CHARACTERS:
        stretch_ = stretch_[: stretch_.rfind(" ", 0, MAX_QUOTATION_CHARACTERS)].rstrip() + " …"
    return best, stretch_


_NOTHING: frozenset[tuple[bool, str]] = frozenset()


def _common(question: Terms, sentence: str) -> frozenset[tuple[bool, str]]:
    """The question's words and numbers that a sentence has, each with whether it is a number."""
    said = terms_of(sentence)
    numbers = ((True, number) for number in question.numbers & said.numbers)
    return frozenset(numbers).union((False, word) for word in question.words & said.words)


def _as_quotation(text: str) -> str:
    """A Markdown quotation without headings, which would be too prominent."""
    lines = [line for line in text.splitlines() if not _HEADING.match(line)] or [text.strip("# ")]
    return "\n".join(f"> {line}" if line.strip() else ">" for line in "\n".join(lines).strip().splitlines())
