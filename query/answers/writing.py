"""Sanitising a model's text while it is still being written. Pure.

Clients may render an answer as Markdown. If a document made the model write an image, the reader's browser would send
data in the image's address without a click; a link would send it with one. Therefore images and active markup are
removed, links stay only if they lead to sources of the passages, and addresses that no passage contains are removed.
(The words of markup stay: ``<`` becomes ``‹``.) An address that a passage contains is shown as code, which no renderer
turns into a link; where it cannot be known what a renderer takes for code, it is removed too. A name with dots, like
that of a host or a file, and a mail address are shown as code as well, because some renderers and chat programs link to
them. Citations get a uniform format, and those of passages that do not exist are removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from html import unescape

import regex

from query.answers.markdown import CodeTracker
from query.answers.model import NumberedPassage

_SPAN = r"(?:[^()]|\([^()]{0,500}\)){0,4000}"
_NUMBERS = r"\d{1,4}(?:[ \t]*[,;\u2013-][ \t]*\d{1,4}){0,20}"
_URL = r"(?:(?:https?|ftp)://|www\.|mailto:|xmpp:)[^\s<>\"'`]{0,4000}"
_MAIL = r"[a-z0-9.!#$%&'*+/=?^_`{|}~-]{1,200}@[a-z0-9.-]{1,255}"
"""A mail address as Markdown takes it for a link, in angle brackets."""
_LETTER = r"\p{Latin}\p{Cyrillic}\p{Greek}\p{Arabic}\p{Hebrew}\p{Devanagari}0-9"
"""The letters and digits of names, without the scripts that put no space between words."""
_TOP_LEVEL = rf"(?:[a-z]{{2,63}}|xn--[a-z0-9-]{{2,59}}|\p{{Cyrillic}}{{2,63}})(?![{_LETTER}])"
_TAIL = r"[^\s<>\"'`\[\]()|\\!]{0,4000}"
_NAME = (
    rf"(?<![{_LETTER}_])(?:[{_LETTER}_.+%-]{{1,200}}(?:@[{_LETTER}_-]{{0,63}}(?:\.[{_LETTER}_-]{{1,63}})+)+"
    rf"|[{_LETTER}_/.@+%~-]{{1,263}}?(?<=[{_LETTER}_-])\.{_TOP_LEVEL}"
    rf"(?:[_-][{_LETTER}_-]{{0,63}}(?=\.[{_LETTER}_-]))?(?:\.[{_LETTER}_-]{{1,63}})*+)"
    rf"(?:[:/?\#@]{_TAIL})?"
)
"""A host, a mail address or a path without a scheme. Its parts are not counted: when each part of ``a.a.a.`` might
begin a host of many parts, two thousand characters took 13 s, in which nobody else was answered."""
_ADDRESS = rf"@|//|www(?:\.|\Z)|\.{_TOP_LEVEL}[/?\#]"
_NAMED_ADDRESS = regex.compile(rf"{_ADDRESS}|\.{_TOP_LEVEL}:(?!\d{{1,5}}(?::\d{{1,5}})?\Z)", regex.IGNORECASE)
"""A name that a renderer may link to together with what stands around it: a passage may hold the name alone. After a
port, which may also be a line of a file, a link ends."""
_LINKED_NAME = regex.compile(
    rf"{_ADDRESS}|\.{_TOP_LEVEL}:|\.(?:[a-z]{{2}}|xn--[a-z0-9-]+|biz|com|edu|gov|net|org|pro|web|xxx|aero|asia|coop|info"
    rf"|museum|name|shop|app|dev|\p{{Cyrillic}}{{2,}})(?![{_LETTER}])",
    regex.IGNORECASE,
)
"""A name that some renderers link to: markdown-it knows these domains."""
_DOT_OF_WWW = regex.compile(r"(?<=www)\.", regex.IGNORECASE)
_ENTITY_IN_NAME = regex.compile(r"&(?=#?[a-z0-9]{0,32}(?:;|\Z))", regex.IGNORECASE)
"""The beginning of an entity in a name: after it has been read, the rest of the name may be another address."""
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
    r"|(?P<auto><(?P<address>[a-z][a-z0-9+.-]{1,31}:[^\s<>]{0,4000}|" + _MAIL + r")>)"
    r"|(?P<unseen><think>.{0,200000}?(?:</think>\s*|\Z))"
    r"|(?P<comment><(?=[!?]))"
    r"|(?P<entity>&(?=(?:#[0-9]{1,7}|#x[0-9a-f]{1,6}|[a-z][a-z0-9]{1,31});))"
    r"|(?P<stop>\\(?=\.(?!\w)))"
    r"|(?P<escape>\\(?=[:/.@]))"
    r"|(?P<element><(?=/?(?:(?:" + _SWALLOWING + r")[\s/>]|[a-z][a-z0-9+.-]{1,31}:"
    rf"|[a-z][^\s/<>(]*+(?:[<(]|[\s/][^>=<(]{{0,{_ATTRIBUTES}}}+(?:=|[^>])))))"
    r"|(?P<url>" + _URL + r")"
    r"|(?P<name>" + _NAME + r")"
    r"|(?P<slashes>//(?=[\w\[]))",
    regex.IGNORECASE | regex.DOTALL,
)
"""A construct at a position; the first alternative that matches wins. An element is also what begins like one, or like
an address in angle brackets, and holds the beginning of another construct: with that removed or replaced, it might
become one."""


def _prefixes(*words: str) -> str:
    return "|".join(sorted({word[:n] for word in words for n in range(1, len(word))}, key=len, reverse=True))


_PENDING = regex.compile(
    r"(?:"
    + _URL  # first, because the search for names in a long one that has not ended takes the square of its length
    + r"|!"
    r"|[ \t]{1,8}"
    r"|[ \t]{0,8}[\[\u3010]" + r"[\d \t,;\u2013-]{0,150}(?:\u2020[^\]\u3011\n]{0,100})?"
    r"|[ \t]{0,8}[\[\u3010]"
    + _NUMBERS
    + r"(?:\u2020[^\]\u3011\n]{0,100})?[\]\u3011](?:\((?:[^()]|\([^()]{0,500}\)){0,4000}(?:\([^()]{0,500})?\)?)?"
    r"|\](?:\((?:[^()]|\([^()]{0,500}\)){0,4000}(?:\([^()]{0,500})?\)?)?"
    rf"|</?(?:[a-z][^\s/>]*+(?:[\s/][^>=]{{0,{_ATTRIBUTES}}})?)?|<[^\s<>]{{1,456}}>?"
    r"|<[a-z][a-z0-9+.-]{1,31}:[^\s<>]{0,4000}>?"
    r"|&(?:#?[a-z0-9]{0,31})|\\\.?|//?"
    rf"|(?<![{_LETTER}_])[{_LETTER}_/.@+%~-]{{1,500}}|" + _NAME + r""
    r"|<think>(?:(?!</think>).){0,200000}|<think>.{0,200000}?</think>\s*"
    r"|(?:" + _prefixes("https://", "http://", "ftp://", "www.", "mailto:", "xmpp:") + r"|" + _URL + r"))\Z",
    regex.IGNORECASE | regex.DOTALL,
)
"""The beginning of a construct that the next piece may complete or extend."""
_START = regex.compile(rf"[!\[\]\u3010<`&\\\t hfmwx/.@~-]|(?<![{_LETTER}_])[{_LETTER}_]", regex.IGNORECASE)
"""Characters that may begin a construct. An address may begin within a word, because renderers differ."""
_TRAILING = ".,;:!?)]}…*_"
_ENTITY = regex.compile("&[^;]{1,33};")
_OF_ADDRESSES = regex.compile(r"[\w:/.@+-]", regex.ASCII)
"""Characters of addresses. Some renderers look for addresses after they have read entities and escapes."""
_TICKS = regex.compile("`+")
_OPEN_ELEMENT = regex.compile(r"</?[a-z][^>]*\Z", regex.IGNORECASE)
_INFO = regex.compile(r"[\w+#.: -]{0,40}")
"""The rest of a line that begins a block of code: the name of a language, if any."""
MAX_CODE_CHARACTERS = 2_000
"""Backticks whose partner is further away count as having none: nothing is shown while it is searched for."""


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
        self._tracker = CodeTracker()
        """Follows what was shown."""
        self._is_in_span = self._is_in_cell = False
        """Whether a code span is being sanitised, and whether it may be in two cells of a table."""
        self._open_ticks = ""
        """The backticks of what may be a code span over several lines."""

    def feed(self, piece: str) -> str:
        self._buffer += piece.replace("\r", "")  # which Markdown takes for the end of a line
        return self._scan(last=False)

    def end(self) -> str:
        return self._scan(last=True)

    def _scan(self, *, last: bool) -> str:
        text, at, out = self._buffer, 0, list[str]()

        def show(shown: str) -> None:
            out.append(shown)
            self._tracker.feed(shown)

        while at < len(text):
            start = _START.search(text, at)
            if start is None:
                show(text[at:])
                at = len(text)
                break
            show(text[at : start.start()])
            at = start.start()
            if text[at] == "`":
                if (code := self._find_code(text, at, last=last)) is None:
                    break
                end, shown = code
                show(shown)
                at = end
                continue
            if not last and _PENDING.match(text, at):
                break
            match = _CONSTRUCT.match(text, at)
            end = match.end() if match else at + 1
            show(self._replacement(match, text[end : end + 1]) if match else text[at])
            at = end
        self._buffer = text[at:]
        return "".join(out)

    def _find_code(self, text: str, at: int, *, last: bool) -> tuple[int, str] | None:
        """Return where the construct that begins with these backticks ends, and how it is shown; None: the text that
        follows decides."""
        window = text[at : at + MAX_CODE_CHARACTERS]
        line, newline, _ = window.partition("\n")
        is_known = last or bool(newline) or len(window) == MAX_CODE_CHARACTERS
        runs = [(run.start(), run.end()) for run in _TICKS.finditer(line)]
        if not is_known and runs[-1][1] == len(line):
            return None
        _, end = runs[0]
        ticks = line[:end]
        space = " " if self._tracker.last == "`" else ""  # two runs of backticks would be one
        if self._tracker.in_block:
            return at + end, space + ticks
        partner = next((start for start, stop in runs[1:] if stop - start == end), None)
        if partner is not None:
            if (shown := self._span(ticks, line[end:partner])) is not None:
                return at + partner + end, space + shown
        elif not is_known:
            return None
        elif end >= 3 and self._tracker.may_open_block and len(runs) == 1 and _INFO.fullmatch(line, end):
            return at + len(line), line
        if not self._is_over_lines:
            self._open_ticks = ticks
        elif ticks == self._open_ticks:
            self._open_ticks = ""
        self._tracker.leave_open()
        return at + end, space + ticks

    def _span(self, ticks: str, content: str) -> str | None:
        """A code span; None if a renderer may see it differently."""
        if not self._tracker.is_certain or self._tracker.last == "\\" or "<think>" in content.lower():
            return None
        before = deepcopy(self.findings)
        self._is_in_span, self._is_in_cell = True, "|" in content
        inside, at = "", 0
        while (start := _START.search(content, at)) is not None:
            inside += content[at : start.start()]
            match = _CONSTRUCT.match(content, start.start())
            at = match.end() if match else start.end()
            if match:
                inside += self._replacement(match, content[at : at + 1])
            else:  # an element that is not closed goes on after the span for who reads the text as HTML
                inside += "\u2039" if _OPEN_ELEMENT.match(content, start.start()) else start[0]
        inside += content[at:]
        self._is_in_span = self._is_in_cell = False
        if inside and inside.strip("`") == inside and ticks not in _TICKS.findall(inside):
            if "|" in content:
                self._tracker.leave_open()
            return f"{ticks}{inside}{ticks}"
        self.findings = before
        return None

    @property
    def _is_code(self) -> bool:
        """Whether this is code for every renderer."""
        return self._is_in_span or (self._tracker.in_block and self._tracker.is_certain)

    @property
    def _seems_code(self) -> bool:
        return self._is_in_span or self._tracker.in_block or self._is_over_lines

    @property
    def _is_over_lines(self) -> bool:
        return bool(self._open_ticks) and self._tracker.has_open_ticks

    def _replacement(self, match: regex.Match[str], after: str) -> str:
        """after: the next character."""
        groups, whole = match.groupdict(), str(match[0])
        if groups["cite"]:
            is_unchanged = self._seems_code and not whole.endswith(")")
            shown = whole if is_unchanged else self._cite(whole, groups["numbers"])
            return shown + (" " if after and after in "(:" else "") if shown else self._gap(after)
        if groups["link"] and (address := self._source_in(groups["target"])) is not None:
            # If this is no link for a renderer, what follows must not become a part of the address.
            return f"]({address})" + ("" if not after or after in " \t\n.,;:!?)*_|" else " ")
        if groups["auto"] or groups["url"]:
            return self._address(groups["address"] or groups["url"], after)
        if groups["unseen"]:
            return " "  # not empty: the text before and after must not form one construct
        if groups["comment"]:
            return "\u2039"  # visible, like the rest of the comment
        if groups["entity"]:
            return "&amp;" if self._is_written_differently(match) else whole
        if groups["stop"] or groups["escape"]:
            is_stop = groups["stop"] and self._tracker.line[-3:].lower() != "www"
            return whole if is_stop or self._is_code else "\\\\"
        if groups["name"]:
            return self._name(whole)
        if groups["slashes"]:
            return whole if self._is_code else "// "
        if groups["broken"] is not None:
            return "] "  # so that it is neither a link nor, before a colon, a link definition
        self.findings.removed += 1
        if groups["image"]:
            return " " if self._tracker.last == "!" else ""
        if groups["link"]:
            return "] " if after and after in "(:" else "]"
        return "\u2039"

    def _gap(self, after: str) -> str:
        """Return the text in the place of a removed construct: a space, unless the end of a sentence follows, so that
        the texts before and after it do not become one construct."""
        before = self._tracker.last
        is_word = after == "." and self._tracker.line[-3:].lower() == "www"
        return "" if not before or before.isspace() or not after or (after in " \t\n.,;!?)" and not is_word) else " "

    def _is_written_differently(self, match: regex.Match[str]) -> bool:
        """Whether an entity stands for a character of an address."""
        if self._is_code:
            return False
        entity = _ENTITY.match(match.string, match.start())
        return entity is not None and bool(_OF_ADDRESSES.search(unescape(entity[0])))

    def _cite(self, whole: str, numbers: str) -> str:
        named = list(dict.fromkeys(_each(numbers)))
        for n in named:
            citations = self.findings.cited if n in self._numbers else self.findings.bad_citations
            if n not in citations:
                citations.append(n)
        shown = "".join(f"[{n}]" for n in named if n in self._numbers)
        return whole[: len(whole) - len(whole.lstrip())] + shown if shown else ""

    def _source_in(self, target: str) -> str | None:
        """The address of a link, without its title, if it is that of a source. What follows it is not shown: if it is
        no title, the whole is no link, and an address in it would become one."""
        [written, *_] = regex.split(r"[ \t\n]+", target.strip(" \t\n"))  # other spaces are part of an address
        is_bracketed = len(written) > 1 and written[0] == "<" and written[-1] == ">"
        return str(written) if (written[1:-1] if is_bracketed else written) in self._sources else None

    def _address(self, address: str, after: str) -> str:
        """after: the next character."""
        bare = address.rstrip(_TRAILING)
        if address in self._sources or bare in self._sources:
            # A renderer may take what follows for a part of the address.
            return f"{address} " if after and after not in " \t\n" and not self._is_code else address
        # Within a code span a backtick, and within a table a line, would end the code.
        if any(bare in text for text in self._texts) and not {"`", "|"} & set(bare):
            if self._is_code and not self._is_in_cell:
                return address
            if not self._seems_code and self._tracker.is_certain:
                return self._as_code(bare) + address[len(bare) :]
        self.findings.removed += 1
        return "(address removed)"

    def _as_code(self, text: str) -> str:
        space = " " if self._tracker.last in ("`", "\\") else ""
        return f"{space}`{text}`"

    def _name(self, name: str) -> str:
        if self._is_code:
            return name
        bare = name.rstrip(_TRAILING)
        rest = name[len(bare) :]
        is_known = any(bare in text for text in self._texts)
        is_certain = self._tracker.is_certain and not self._seems_code
        if is_certain and (is_known or not self._tracker.may_be_formula):
            return self._as_code(bare) + rest
        if not (_NAMED_ADDRESS if is_known else _LINKED_NAME).search(bare):
            return str(_ENTITY_IN_NAME.sub("&amp;", name))
        self.findings.removed += 1
        broken = str(_DOT_OF_WWW.sub(" . ", bare)).replace(".", ". ").replace("//", "// ")
        return str(_ENTITY_IN_NAME.sub("&amp;", broken + (" " if bare[-3:].lower() == "www" else "") + rest))


def _each(numbers: str) -> Iterable[int]:
    """The numbers of a citation: ``1, 3-5`` becomes 1 3 4 5; of a range of more than ten only both ends."""
    for part in regex.split(r"[,;]", numbers):
        ends = [int(end) for end in regex.split(r"[\u2013-]", part) if end.strip()]
        yield from range(ends[0], ends[1] + 1) if len(ends) == 2 and 0 < ends[1] - ends[0] <= 10 else ends
