"""Sanitising a model's text while it is still being written. Pure.

Clients may render an answer as Markdown. If a document made the model write an image, the reader's browser would send
data in the image's address without a click; a link would send it with one. Therefore images and active markup are
removed, links stay only if they lead to sources of the passages, and addresses that no passage contains are removed.
(The words of markup stay: ``<`` becomes ``‹``.) Citations get a uniform format, and those of passages that do not exist
are removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import regex

from query.answers.model import NumberedPassage

_SPAN = r"(?:[^()]|\([^()]{0,500}\)){0,4000}"
_NUMBERS = r"\d{1,4}(?:[ \t]*[,;\u2013-][ \t]*\d{1,4}){0,20}"
_URL = r"(?:(?:https?|ftp)://|www\.)[^\s<>\"'`]{0,4000}"
_SWALLOWING = (
    "script|style|textarea|title|template|xmp|plaintext|noscript|noembed|noframes|iframe|object|svg|math|select"
)
"""Elements that are active without attributes, or that hide the text after them."""
_ATTRIBUTES = 300
"""The number of characters after an element's name within which an attribute is recognised; an element that has not
ended by then counts as one with attributes."""
_CONSTRUCT = regex.compile(
    r"(?P<image>!(?=\[))"
    r"|(?P<cite>[ \t]{0,8}[\[\u3010](?P<numbers>" + _NUMBERS + r")(?:\u2020[^\]\u3011\n]{0,100})?[\]\u3011]"
    r"(?:\(" + _SPAN + r"\)|(?P<open>(?=[(:])))?)"
    r"|(?P<link>\]\((?P<target>" + _SPAN + r")\))"
    r"|(?P<broken>\](?=[(:]))"
    r"|(?P<auto><(?P<address>[a-z][a-z0-9+.-]{1,31}:[^\s<>]{0,4000})>)"
    r"|(?P<unseen><think>.{0,200000}?(?:</think>\s*|\Z))"
    r"|(?P<comment><!--)"
    r"|(?P<element><(?=/?(?:(?:" + _SWALLOWING + r")[\s/>]|[a-z][a-z0-9+.-]{1,31}:"
    rf"|[a-z][^\s/<>(]*+(?:[<(]|[\s/][^>=<(]{{0,{_ATTRIBUTES}}}+(?:=|[^>])))))"
    r"|(?P<url>" + _URL + r")"
    r"|(?P<ticks>`{1,20})",
    regex.IGNORECASE | regex.DOTALL,
)
"""A construct at a position; the first alternative that matches wins. An element is also what begins like one, or like
an address in angle brackets, and holds the beginning of another construct: with that removed or replaced, it might
become one."""


def _prefixes(*words: str) -> str:
    return "|".join(sorted({word[:n] for word in words for n in range(1, len(word))}, key=len, reverse=True))


_PENDING = regex.compile(
    r"(?:!"
    r"|[ \t]{1,8}"
    r"|[ \t]{0,8}[\[\u3010]" + r"[\d \t,;\u2013-]{0,150}(?:\u2020[^\]\u3011\n]{0,100})?"
    r"|[ \t]{0,8}[\[\u3010]"
    + _NUMBERS
    + r"(?:\u2020[^\]\u3011\n]{0,100})?[\]\u3011](?:\((?:[^()]|\([^()]{0,500}\)){0,4000}(?:\([^()]{0,500})?)?"
    r"|\](?:\((?:[^()]|\([^()]{0,500}\)){0,4000}(?:\([^()]{0,500})?)?"
    rf"|</?(?:[a-z][^\s/>]*+(?:[\s/][^>=]{{0,{_ATTRIBUTES}}})?)?|<!-?"
    r"|<[a-z][a-z0-9+.-]{1,31}:[^\s<>]{0,4000}"
    r"|<think>(?:(?!</think>).){0,200000}|<think>.{0,200000}?</think>\s*"
    r"|(?:" + _prefixes("https://", "http://", "ftp://", "www.") + r"|" + _URL + r")"
    r"|`{1,19})\Z",
    regex.IGNORECASE | regex.DOTALL,
)
"""The beginning of a construct that the next piece may complete or extend."""
_START = regex.compile(r"[!\[\]\u3010<`\t hfw]", regex.IGNORECASE)
"""Characters that may begin a construct. An address may begin within a word, because renderers differ."""
_TRAILING = ".,;:!?)]}…*_"


@dataclass(slots=True)
class Findings:
    """Citations and removals in the text so far."""

    cited: list[int] = field(default_factory=list)
    """The numbers of cited passages, in the order of their first citation."""
    bad_citations: list[int] = field(default_factory=list)
    removed: int = 0
    """How many images, links, addresses and elements were removed."""


class AnswerSanitizer:
    """Sanitises one answer. ``feed`` returns the text that may be shown now, ``end`` the rest. Law: the result is the
    same however the text is cut into pieces."""

    def __init__(self, passages: Collection[NumberedPassage]) -> None:
        self.findings = Findings()
        self._numbers = frozenset(p.n for p in passages)
        self._sources = frozenset(p.result.passage.source_url for p in passages if p.result.passage.source_url)
        self._texts = [p.text for p in passages]
        self._buffer = ""
        self._code = ""
        """The backticks that opened the current code; empty outside of code."""

    def feed(self, piece: str) -> str:
        self._buffer += piece
        return self._scan(last=False)

    def end(self) -> str:
        return self._scan(last=True)

    def _scan(self, *, last: bool) -> str:
        text, at, out = self._buffer, 0, list[str]()
        while at < len(text):
            start = _START.search(text, at)
            if start is None:
                out.append(text[at:])
                at = len(text)
                break
            out.append(text[at : start.start()])
            at = start.start()
            if not last and _PENDING.match(text, at):
                break
            match = _CONSTRUCT.match(text, at)
            out.append(self._replacement(match) if match else text[at])
            at = match.end() if match else at + 1
        self._buffer = text[at:]
        return "".join(out)

    def _replacement(self, match: regex.Match[str]) -> str:
        groups, whole = match.groupdict(), str(match[0])
        if groups["ticks"]:
            self._tick(whole)
            return whole
        if groups["cite"]:
            after = " " if groups["open"] is not None else ""
            return (whole if self._code and not whole.endswith(")") else self._cite(whole, groups["numbers"])) + after
        if groups["link"] and _address_in(groups["target"]) in self._sources:
            return whole
        if groups["auto"] or groups["url"]:
            return self._address(groups["address"] or groups["url"])
        if groups["unseen"]:
            return " "  # not empty: the text before and after must not form one construct
        if groups["comment"]:
            return "\u2039!--"  # visible, like the rest of the comment
        if groups["broken"] is not None:
            return "] "  # so that it is neither a link nor, before a colon, a link definition
        self.findings.removed += 1
        return {"image": "", "link": "]"}.get(_kind(groups), "\u2039")

    def _tick(self, ticks: str) -> None:
        if not self._code:
            self._code = ticks
        elif ticks == self._code or (len(self._code) >= 3 and len(ticks) >= len(self._code)):
            self._code = ""

    def _cite(self, whole: str, numbers: str) -> str:
        named = list(dict.fromkeys(_each(numbers)))
        for n in named:
            citations = self.findings.cited if n in self._numbers else self.findings.bad_citations
            if n not in citations:
                citations.append(n)
        shown = "".join(f"[{n}]" for n in named if n in self._numbers)
        return whole[: len(whole) - len(whole.lstrip())] + shown if shown else ""

    def _address(self, address: str) -> str:
        bare = address.rstrip(_TRAILING)
        if address in self._sources or bare in self._sources:
            return address
        if any(bare in text for text in self._texts):
            # An address from a passage is shown as code, which no renderer turns into a link.
            return address if self._code else f"`{bare}`{address[len(bare) :]}"
        self.findings.removed += 1
        return "(address removed)"


def _kind(groups: dict[str, str | None]) -> str:
    return next(name for name in ("image", "link", "element") if groups[name] is not None)


def _address_in(target: str) -> str:
    """The address of a link without its title."""
    words = target.split()
    return words[0].strip("<>") if words else ""


def _each(numbers: str) -> Iterable[int]:
    """The numbers of a citation: ``1, 3-5`` becomes 1 3 4 5; of a range of more than ten only both ends."""
    for part in regex.split(r"[,;]", numbers):
        ends = [int(end) for end in regex.split(r"[\u2013-]", part) if end.strip()]
        yield from range(ends[0], ends[1] + 1) if len(ends) == 2 and 0 < ends[1] - ends[0] <= 10 else ends


def sanitize(text: str, passages: Collection[NumberedPassage]) -> tuple[str, Findings]:
    """Sanitise a whole text."""
    writing = AnswerSanitizer(passages)
    return writing.feed(text) + writing.end(), writing.findings
