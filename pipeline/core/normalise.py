"""Normalising content: the text that is hashed, stored, chunked and shown."""

from __future__ import annotations

import re
import unicodedata

from pipeline.core.errors import Poison

MESSAGES_TYPE = "text/x-penstock-messages"
RECORD_SEPARATOR = "\x1e"
"""Separates the messages of a ``text/x-penstock-messages`` document. It is removed from all other texts."""

_HTML = frozenset({"text/html", "application/xhtml+xml"})

_UNUSUAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
"""The characters of the next three patterns. Most texts have none of them, and one search is four times as fast."""
_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_CONTROLS_BUT_RS = re.compile("[\x00-\x08\x0e-\x1d\x1f\x7f-\x9f]")
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u17b4\u17b5\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0080-\U000e00ff\U000e01f0-\U000e0fff]"
)
"""Characters that are not displayed (Unicode's Default_Ignorable_Code_Point), without those of the next four patterns,
which some scripts need in some places. Everywhere else they only hide text from people."""
_TAG_CHARACTERS = re.compile("(\U0001f3f4[\U000e0020-\U000e007e]{1,8}\U000e007f)|[\U000e0000-\U000e007f]")
"""Invisible letters. A sequence of them after a black flag is the flag of a region, such as Scotland's; all others hide
text."""
_MONGOLIAN = re.compile("((?<=[\u180a\u1820-\u18a8\u18aa])(?:[\u180b-\u180d\u180f]\u180e?|\u180e))|[\u180b-\u180f]")
"""After a letter of Mongolian, a selector of its form and a separator of the vowel that follows."""
_FILLERS = re.compile(
    "((?<=[\u1100-\u115e\ua960-\ua97c])\u1160|\u115f(?=[\u1161-\u11a7\ud7b0-\ud7c6])|\u115f\u1160(?=[\u11a8-\u11ff\ud7cb-\ud7fb])"
    "|(?<=[\u3131-\u3163\u3165-\u318e])\u3164|\u3164(?=[\u3131-\u3163\u3165-\u318e])"
    "|(?<=[\uffa1-\uffdc])\uffa0|\uffa0(?=[\uffa1-\uffdc]))|[\u115f\u1160\u3164\uffa0]"
)
"""In the place of the consonant or the vowel that a syllable of Hangul lacks."""
_SELECTORS_AND_JOINERS = re.compile("[\u200c\u200d\ufe00-\ufe0f\U000e0100-\U000e01ef]+")
_HIDDEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""The characters of the last five patterns."""
_JOINING = "\u0590"
"""The first character of the scripts that may need joiners (emoji need them too). Between Latin, Greek or Cyrillic
letters a joiner only hides a word."""
_MOST_MARKS = 8
"""The most marks, selectors and joiners of a letter before a joiner."""
_JOINERS = "\u200c\u200d"
_IDEOGRAPHIC = "\U000e0100"
"""The first of the selectors that only ideographs have."""
_IDEOGRAPH = re.compile("[\u3005-\u3007\u3400-\u9fff\uf900-\ufaff\U00017000-\U0001b2ff\U00020000-\U0003ffff]")


def is_html(media_type: str) -> bool:
    """Whether content of this media type is converted to Markdown, which is slow."""
    return _kind(media_type) in _HTML


def _kind(media_type: str) -> str:
    return media_type.partition(";")[0].strip().lower() or "text/plain"


def normalise(content: str, media_type: str) -> tuple[str, str]:
    """The (text, media type) as it is stored: NFC, with ``\\n`` as line ends, without invisible characters, HTML
    converted to Markdown.

    Idempotent: normalising the result with the returned media type changes nothing. Raises Poison("bad_text") for lone
    surrogates, which no store can hold.
    """
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Poison("bad_text", "the text holds a lone surrogate, which is not Unicode: fix its encoding") from error
    kind = _kind(media_type)
    if kind in _HTML:
        from pipeline.core.html import to_markdown  # here: importing its parser takes 0.1 s

        return clean(to_markdown(clean(content))), "text/markdown"
    return clean(content, keep_record_separators=kind == MESSAGES_TYPE), kind


def clean(text: str, *, keep_record_separators: bool = False) -> str:
    """The text in NFC, with ``\\n`` for every line end, and without control, zero-width and direction characters."""
    if _UNUSUAL.search(text):
        text = _LINE_ENDS.sub("\n", text)
        text = (_CONTROLS_BUT_RS if keep_record_separators else _CONTROLS).sub("", text)
    if text.isascii():
        return text
    text = nfc(text)
    if not _HIDDEN.search(text):
        return text
    text = _INVISIBLE.sub("", text)
    text = _TAG_CHARACTERS.sub(r"\1", text)
    text = _MONGOLIAN.sub(_first_group, text)
    text = _FILLERS.sub(_first_group, text)
    text = _SELECTORS_AND_JOINERS.sub(_needed, text)
    return nfc(text)


_MANY_MARKS = 31
"""As many marks in a row are put into order here: no script has so many (UAX 15, section 13)."""
_MARKS_OF_TWO = "\u0f73\u0f75\u0f81"
"""The characters that are no marks themselves and consist of two."""


def nfc(text: str) -> str:
    """The text in NFC, in time proportional to its length.

    The library sorts the marks of a letter by insertion, and nothing else runs meanwhile: half a million took four
    minutes. It gets them in their order.
    """
    if unicodedata.is_normalized("NFC", text):
        return text
    parts, done = list[str](), 0
    for at in range(0, len(text), _MANY_MARKS):  # one of so many in a row is at one of these places
        if at < done or not _is_mark(text[at]):
            continue
        start = end = at
        while start > done and _is_mark(text[start - 1]):
            start -= 1
        while end < len(text) and _is_mark(text[end]):
            end += 1
        if end - start >= _MANY_MARKS:
            marks = "".join(unicodedata.normalize("NFD", mark) for mark in text[start:end])
            parts += [text[done:start], *sorted(marks, key=unicodedata.combining)]
            done = end
    return unicodedata.normalize("NFC", "".join([*parts, text[done:]]))


def _is_mark(character: str) -> bool:
    return unicodedata.combining(character) > 0 or character in _MARKS_OF_TWO


def _first_group(match: re.Match[str]) -> str:
    return match[1] or ""


def _needed(match: re.Match[str]) -> str:
    """A selector of the form of the character before it, and a joiner, where they may change what is displayed. What
    becomes of one does not depend on the order of marks, nor on what becomes of others."""
    text, run, start, end = match.string, match[0], match.start(), match.end()
    needed = run[0] if start and run[0] not in _JOINERS and _has_forms(text[start - 1], run[0]) else ""
    if end < len(text) and _may_join(_letter_before(text, start)) and (_is_mark(text[end]) or _may_join(text[end])):
        needed += next((character for character in run if character in _JOINERS), "")
    return needed


def _has_forms(character: str, selector: str) -> bool:
    """Whether a selector may choose among forms of this character: of an ideograph, a symbol, a digit or a letter, but
    not of one of Latin, Greek or Cyrillic."""
    if selector >= _IDEOGRAPHIC:
        return bool(_IDEOGRAPH.match(character))
    return not (character.isspace() or _is_mark(character) or (character.isalpha() and not _may_join(character)))


def _may_join(character: str) -> bool:
    return character >= _JOINING and not "\u1e00" <= character <= "\u1fff"  # more of Latin and Greek


def _letter_before(text: str, end: int) -> str:
    """The character that the marks before ``end`` belong to; empty: there is none, or there are too many marks."""
    for at in range(end - 1, max(0, end - _MOST_MARKS) - 1, -1):
        if not (_is_mark(text[at]) or _SELECTORS_AND_JOINERS.match(text[at])):
            return text[at]
    return ""
