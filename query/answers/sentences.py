"""The words of a sentence, approximately: its stems, numbers and names. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from Stemmer import Stemmer

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
_STEMMER = Stemmer("english")
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
    """The English stem (Snowball) of an ASCII word in lower case; another word as it is."""
    return str(_STEMMER.stemWord(word)) if word.isascii() and word.isalpha() else word


def _is_name(token: str, *, first: bool) -> bool:
    inner = token[1:]
    shaped = any(c.isupper() or c.isdigit() or c == "_" for c in inner)
    return shaped or (token[0].isupper() and not first)


def _number(token: str) -> str:
    """A normal form of numbers: 1,000 and 1000, 3.0 and 3, ``three`` and 3 are equal."""
    token = _NUMERALS.get(token, token)
    token = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", token).rstrip(".,:/-")
    return re.sub(r"\.0+(?=\D|$)", "", token)
