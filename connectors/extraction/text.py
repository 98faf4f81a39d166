"""Reads plain text: finds its encoding, and its media type by the name's ending or else by its beginning.

A wrong encoding ruins a document silently, so a text whose encoding is uncertain is refused.
"""

from __future__ import annotations

import codecs
import json
import re

from charset_normalizer import CharsetMatches, from_bytes

from connectors.extraction.result import Extracted, Unreadable
from connectors.extraction.titles import byline
from connectors.faults import OF_DATA, place
from pipeline.core.normalise import MESSAGES_TYPE
from topics.messages import MAX_CONTENT_BYTES

_BOMS = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_MAGIC = (
    b"\x7fELF",
    b"MZ\x90",
    b"\x89PNG",
    b"\xff\xd8\xff",
    b"GIF8",
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ",
    b"7z\xbc\xaf",
    b"Rar!\x1a",
    b"\xca\xfe\xba\xbe",
    b"\xcf\xfa\xed\xfe",
    b"\x28\xb5\x2f\xfd",
    b"\xd0\xcf\x11\xe0",
    b"OggS",
    b"fLaC",
    b"ID3",
    b"RIFF",
    b"SQLite format 3\x00",
    b"%!PS",
    b"{\\rtf",
)
_CONTROL = re.compile(r"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")
_SNIFFED_BYTES = 64 * 1024
MAX_CONTROL_SHARE = 0.02
"""Logs hold a stray control character; binary data that happens to decode holds many."""

_DECLARED_ENCODING = re.compile(
    rb"""(?:<meta[^>]{0,200}?charset|<\?xml[^>]{0,200}?encoding|coding)\s*[:=]\s*["']?([-\w.]+)""", re.I
)
_ALIASES = {"iso-8859-1": "cp1252", "latin-1": "cp1252", "latin1": "cp1252", "us-ascii": "cp1252", "ascii": "cp1252"}
"""Names as browsers understand them (the WHATWG encoding standard)."""

_REFUSED_CODECS = frozenset({"idna", "punycode", "raw_unicode_escape", "undefined", "unicode_escape", "utf_7"})
"""Python's codecs for pieces of text: they raise other errors, yield lone surrogates, or take more than linear time."""

_JAPANESE_MODE = (b"\x1b$@", b"\x1b$B")
_ASCII_MODE = (b"\x1b(B", b"\x1b(J")
"""Escape sequences of ISO-2022-JP. All its bytes are ASCII, so it would pass as UTF-8 and be garbage."""

MIN_COHERENCE = 0.15
"""Least coherence by charset-normalizer: how well the letters' frequencies fit a language. 0 for texts that are too
short to tell."""
MAX_MESS = 0.1
RIVAL_SCORE = 0.02
"""If another encoding scores within this of the best and yields another text, the encoding is uncertain."""
_EXCLUDED = ["utf_7", "utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be"]
"""Any even number of bytes decodes as UTF-16: without a byte order mark it proves nothing."""

_WESTERN_LETTERS = frozenset("àâäáãåæçèéêëìíîïñòóôöõøœùúûüÿßÀÂÄÁÃÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÖÕØŒÙÚÛÜŸ")
_WESTERN_MARKS = frozenset("‘’“”„‚–—…•€£§©®™°«»¿¡·½¼¾×±\xa0")
_MISPLACED = re.compile(r"[^\W\d_](?:[¿¡€£§©®™°«»•½¼¾×±·][^\W\d_]|[‚„])|[a-zß-ÿ][À-ÖØ-ÞŒ]")
_PORTUGUESE = re.compile("ã[oe]|õe", re.I)
"""Sequences of Portuguese wherever it has ã; Romanian that is decoded as Western has ã without them."""
MAX_WESTERN_SHARE = 0.2


def decode(data: bytes) -> str:
    """Return the text without its byte order mark. Raises Unreadable: binary, encoding."""
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return _require_text(_decode_strictly(data[len(bom) :], encoding))
    if b"\x00" in data:
        raise Unreadable("binary", "is not text (it holds NUL bytes)")
    if data.startswith(_MAGIC):
        raise Unreadable("binary", "is not text (it begins like a binary format)")
    if _has_any(data[:_SNIFFED_BYTES], _JAPANESE_MODE) and _has_any(data[:_SNIFFED_BYTES], _ASCII_MODE):
        return _require_text(_decode_strictly(data, "iso2022_jp"))
    try:
        return _require_text(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        _require_text(data[:_SNIFFED_BYTES].decode("latin-1"))  # no encoding of text uses many control bytes
        return _require_text(_legacy(data, error))


def _has_any(data: bytes, marks: tuple[bytes, ...]) -> bool:
    return any(mark in data for mark in marks)


def _decode_strictly(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise Unreadable("encoding", f"begins as {encoding} but is not valid at byte {error.start}") from error


def _require_text(text: str) -> str:
    if "\x00" in text:
        raise Unreadable("binary", "is not text (it holds NUL characters)")
    sample = text[:_SNIFFED_BYTES]
    controls = len(_CONTROL.findall(sample))
    if controls and controls > MAX_CONTROL_SHARE * len(sample):
        raise Unreadable("binary", "is not text (it is full of control characters)")
    return text


def _legacy(data: bytes, error: UnicodeDecodeError) -> str:
    """Decode a text that is not UTF-8, by the encoding that it declares or else by a confident guess."""
    refusal = Unreadable(
        "encoding", f"is not valid UTF-8 (byte {error.start}) and its encoding is not certain: convert it to UTF-8"
    )
    if declared := _DECLARED_ENCODING.search(data[:2048]):
        name = declared[1].decode("ascii", "replace").lower()
        try:
            codec = codecs.lookup(_ALIASES.get(name, name)).name
            if codec.replace("-", "_") in _REFUSED_CODECS:
                raise refusal from error
            return data.decode(codec)
        except (LookupError, UnicodeDecodeError):
            raise refusal from error
    if _is_broken_utf8(data):
        raise refusal from error
    encoding = _guess(_sample(data))
    if encoding is None:
        raise refusal from error
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        raise refusal from error


def _is_broken_utf8(data: bytes) -> bool:
    """Whether this is damaged UTF-8: complete multi-byte sequences hardly occur by chance."""
    sample = data[:_SNIFFED_BYTES].decode("utf-8", "replace")
    broken = sample.count("\ufffd")
    return sum(char > "\x7f" for char in sample) - broken >= broken


def _sample(data: bytes) -> bytes:
    """Return the lines around the first byte that is not ASCII, at most _SNIFFED_BYTES."""
    first = next((n for n, byte in enumerate(data) if byte > 0x7F), 0)
    start = data.rfind(b"\n", 0, max(0, first - 2048)) + 1
    end = data.rfind(b"\n", start + 1, start + _SNIFFED_BYTES) if len(data) > start + _SNIFFED_BYTES else len(data)
    return data[start : end if end > 0 else start + _SNIFFED_BYTES]


def _guess(sample: bytes) -> str | None:
    matches = from_bytes(sample, cp_exclusion=_EXCLUDED, threshold=MAX_MESS)
    best = matches.best()
    western = _try_decode(sample, "cp1252")
    if western is not None and _looks_western(western):
        same_text = [match.coherence for match in matches if _try_decode(sample, match.encoding) == western]
        if best is None or (same_text and same_text[0] >= best.coherence - 0.1):
            return "cp1252"
        return None
    if best is None or best.coherence < MIN_COHERENCE or _has_rival(matches, sample):
        return None
    return best.encoding


def _has_rival(matches: CharsetMatches, sample: bytes) -> bool:
    best = matches[0]
    text = _try_decode(sample, best.encoding)
    return any(
        match.coherence >= best.coherence - RIVAL_SCORE
        and match.chaos <= best.chaos + RIVAL_SCORE
        and _try_decode(sample, match.encoding) != text
        for match in matches
    )


def _try_decode(data: bytes, encoding: str) -> str | None:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        return None


def _looks_western(text: str) -> bool:
    """Whether a text has mostly plain letters, with the accents and marks of Western European languages where they
    occur in words."""
    high = [char for char in text if char > "\x7f"]
    if any(char not in _WESTERN_LETTERS and char not in _WESTERN_MARKS for char in high):
        return False
    accented = sum(char in _WESTERN_LETTERS for char in high)
    if accented > MAX_WESTERN_SHARE * sum(char.isalpha() for char in text):
        return False
    if "ã" in text and not _PORTUGUESE.search(text):
        return False
    return not _MISPLACED.search(text)


_BY_ENDING = {
    "text/plain": ("txt", "text", "log"),
    "text/markdown": ("md", "markdown", "mdown", "mkd", "mdx", "qmd"),
    "text/x-rst": ("rst", "rest"),
    "text/html": ("html", "htm", "xhtml"),
    "text/csv": ("csv",),
    "text/tab-separated-values": ("tsv", "tab"),
    "application/x-ndjson": ("jsonl", "ndjson"),
    "application/json": ("json", "geojson"),
    "text/x-python": ("py", "pyi", "pyw"),
    "text/javascript": ("js", "mjs", "cjs", "jsx"),
    "text/typescript": ("ts", "mts", "cts"),
    "text/tsx": ("tsx",),
    "text/x-java": ("java",),
    "text/x-go": ("go",),
    "text/x-rust": ("rs",),
    "text/x-c": ("c", "h"),
    "text/x-c++": ("cc", "cpp", "cxx", "hh", "hpp", "hxx", "ipp"),
    "application/sql": ("sql",),
    "application/x-sh": ("sh", "bash", "zsh", "ksh"),
}
_TYPE_OF = {ending: media_type for media_type, endings in _BY_ENDING.items() for ending in endings}
_SHEBANG = re.compile(r"#!\s*\S*?(?:/|env\s+(?:-\S+\s+)*)(python|node|deno|bash|sh|zsh|ksh)[\d.]*\b")
_TYPE_OF_INTERPRETER = {"python": "text/x-python", "node": "text/javascript", "deno": "text/typescript"}
_HTML = re.compile(r"<(?:!doctype\s+html|html[\s>])", re.I)
_BEGINNING_CHARACTERS = 4096
_MAX_PARSED_CHARACTERS = 1024 * 1024
"""A longer text whose name does not give its type is not parsed merely to learn whether it is JSON."""


def media_type_of(name: str, text: str) -> str:
    """Return a text's media type. name: the file's name, with or without folders."""
    base = name.rpartition("/")[2]
    ending = base.rpartition(".")[2].lower() if "." in base.lstrip(".") else ""
    return _TYPE_OF.get(ending) or _by_beginning(text)


def _by_beginning(text: str) -> str:
    if match := _SHEBANG.match(text[:200].partition("\n")[0]):
        return _TYPE_OF_INTERPRETER.get(match[1], "application/x-sh")
    if _HTML.match(_without_prologue(text[:_BEGINNING_CHARACTERS])):
        return "text/html"
    if text[:1] in ("{", "[") and len(text) <= _MAX_PARSED_CHARACTERS:
        if _parses(text):
            return "application/json"
        lines = text.splitlines()
        if len(lines) > 1 and all(_parses(line) for line in lines if line.strip()):
            return "application/x-ndjson"
    return "text/plain"


def _without_prologue(text: str) -> str:
    """Return a text without the XML declaration and comments before its first element."""
    text = text.lstrip()
    for opening, closing in (("<?xml", "?>"), *[("<!--", "-->")] * 10):
        if text.startswith(opening):
            text = text.partition(closing)[2].lstrip()
    return text


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


MAX_TEXT_BYTES = 4 * MAX_CONTENT_BYTES + 4
"""No text of MAX_CONTENT_BYTES is longer in any encoding (UTF-32 with its mark)."""


def read_text(data: bytes, name: str, media_type: str | None = None) -> Extracted:
    """Read a text. media_type: as declared; it counts if neither the name nor the beginning gives one. Raises
    Unreadable, and nothing else, whatever the data are."""
    if len(data) > MAX_TEXT_BYTES:
        raise Unreadable("too_large", f"is {len(data):,} bytes; the limit is 4 MiB of text")
    try:
        text = _within_limit(decode(data))
        if not text.strip():
            raise Unreadable("empty", "is empty")
        declared = (media_type or "").partition(";")[0].strip().lower()
        actual = media_type_of(name, text)
        if actual == "text/plain" and declared.startswith("text/") and declared != MESSAGES_TYPE:
            actual = declared  # but not our own, which is made by connectors alone
        stated = byline(text, actual)
    except OF_DATA as error:
        raise Unreadable("crashed", f"made its reader fail ({place(error)})") from error
    return Extracted(text, actual, stated.title, stated.author)


def _within_limit(text: str) -> str:
    size = len(text) if text.isascii() else len(text.encode())
    if size > MAX_CONTENT_BYTES:
        raise Unreadable("too_large", f"holds {size:,} bytes of text, the limit is {MAX_CONTENT_BYTES:,}")
    return text
