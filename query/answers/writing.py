"""What a model wrote, made safe to show while it is still writing. Pure.

An answer may be rendered as Markdown by whoever shows it. A document that got the model to write an image would make
the reader's browser send what the image's address says, without a click; a link would send it with one. So images and
markup that loads or acts are taken out, links stay only to the sources of the passages, and addresses that no passage
has are taken out too. (Of markup the words stay: ``<`` becomes ``‹``.) Citations are brought into one form, and those
of passages that do not exist are taken out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import regex

from query.answers.model import Numbered

_SPAN = r"(?:[^()]|\([^()]{0,500}\)){0,4000}"
_NUMBERS = r"\d{1,4}(?:[ \t]*[,;\u2013-][ \t]*\d{1,4}){0,20}"
_URL = r"(?:(?:https?|ftp)://|www\.)[^\s<>\"'`]{0,4000}"
_SWALLOWING = (
    "script|style|textarea|title|template|xmp|plaintext|noscript|noembed|noframes|iframe|object|svg|math|select"
)
"""Elements that need no attribute to act, or to swallow what follows."""
_ATTRIBUTES = 300
"""Characters behind an element's name within which an attribute must get its value; without an end by then, it has."""
_CONSTRUCT = regex.compile(
    r"(?P<image>!(?=\[))"
    r"|(?P<cite>[ \t]{0,8}[\[\u3010](?P<numbers>" + _NUMBERS + r")(?:\u2020[^\]\u3011\n]{0,100})?[\]\u3011]"
    r"(?:\(" + _SPAN + r"\)|(?P<open>(?=[(:])))?)"
    r"|(?P<link>\]\((?P<target>" + _SPAN + r")\))"
    r"|(?P<broken>\](?=[(:]))"
    r"|(?P<auto><(?P<address>[a-z][a-z0-9+.-]{1,31}:[^\s<>]{0,4000})>)"
    r"|(?P<unseen><think>.{0,200000}?(?:</think>\s*|\Z))"
    r"|(?P<comment><!--)"
    r"|(?P<element><(?=/?(?:(?:" + _SWALLOWING + r")[\s/>]"
    rf"|[a-z][^\s/>]*+[\s/][^>=]{{0,{_ATTRIBUTES}}}+(?:=|[^>]))))"
    r"|(?P<url>" + _URL + r")"
    r"|(?P<ticks>`{1,20})",
    regex.IGNORECASE | regex.DOTALL,
)
"""At any place, the first alternative that fits."""


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
"""What may still become a construct, or a longer one, with the next piece."""
_START = regex.compile(r"[!\[\]\u3010<`\t hfw]", regex.IGNORECASE)
"""An address may begin within a word: what a renderer takes for one differs."""
_TRAILING = ".,;:!?)]}…*_"


@dataclass(slots=True)
class Found:
    """What was met so far."""

    cited: list[int] = field(default_factory=list)
    """In the order of their first mention."""
    bad_citations: list[int] = field(default_factory=list)
    removed: int = 0
    """Images, links, addresses and markup."""


class Writing:
    """One answer. ``feed`` returns what may be shown now; ``end`` the rest. Law: however the text is cut into pieces,
    what comes out is the same."""

    def __init__(self, passages: Collection[Numbered]) -> None:
        self.found = Found()
        self._numbers = frozenset(p.n for p in passages)
        self._sources = frozenset(p.result.passage.source_url for p in passages if p.result.passage.source_url)
        self._texts = [p.text for p in passages]
        self._held = ""
        self._code = ""
        """The backticks that opened the code that is being written."""

    def feed(self, piece: str) -> str:
        self._held += piece
        return self._scan(last=False)

    def end(self) -> str:
        return self._scan(last=True)

    def _scan(self, *, last: bool) -> str:
        text, at, out = self._held, 0, list[str]()
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
            out.append(self._said(match) if match else text[at])
            at = match.end() if match else at + 1
        self._held = text[at:]
        return "".join(out)

    def _said(self, match: regex.Match[str]) -> str:
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
            return " "  # and not nothing: what stands before and after must not become one construct
        if groups["comment"]:
            return "\u2039!--"  # to be seen, as the rest of it
        if groups["broken"] is not None:
            return "] "  # neither a link nor, before a colon, what defines one, wherever that may stand
        self.found.removed += 1
        return {"image": "", "link": "]"}.get(_kind(groups), "\u2039")

    def _tick(self, ticks: str) -> None:
        if not self._code:
            self._code = ticks
        elif ticks == self._code or (len(self._code) >= 3 and len(ticks) >= len(self._code)):
            self._code = ""

    def _cite(self, whole: str, numbers: str) -> str:
        named = list(dict.fromkeys(_each(numbers)))
        for n in named:
            known = self.found.cited if n in self._numbers else self.found.bad_citations
            if n not in known:
                known.append(n)
        shown = "".join(f"[{n}]" for n in named if n in self._numbers)
        return whole[: len(whole) - len(whole.lstrip())] + shown if shown else ""

    def _address(self, address: str) -> str:
        bare = address.rstrip(_TRAILING)
        if address in self._sources or bare in self._sources:
            return address
        if any(bare in text for text in self._texts):
            # A passage's own words: shown, but as code, which no renderer makes a link of.
            return address if self._code else f"`{bare}`{address[len(bare) :]}"
        self.found.removed += 1
        return "(address removed)"


def _kind(groups: dict[str, str | None]) -> str:
    return next(name for name in ("image", "link", "element") if groups[name] is not None)


def _address_in(target: str) -> str:
    """Of a link: without its title."""
    words = target.split()
    return words[0].strip("<>") if words else ""


def _each(numbers: str) -> Iterable[int]:
    """``1, 3-5`` → 1 3 4 5; a range of more than ten is its two ends."""
    for part in regex.split(r"[,;]", numbers):
        ends = [int(end) for end in regex.split(r"[\u2013-]", part) if end.strip()]
        yield from range(ends[0], ends[1] + 1) if len(ends) == 2 and 0 < ends[1] - ends[0] <= 10 else ends


def scrubbed(text: str, passages: Collection[Numbered]) -> tuple[str, Found]:
    """A whole text at once."""
    writing = Writing(passages)
    return writing.feed(text) + writing.end(), writing.found
