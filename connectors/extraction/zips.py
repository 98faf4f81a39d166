"""Checks a zip of XML before any library unpacks it."""

from __future__ import annotations

import re
import zipfile
from typing import IO

from connectors.extraction.answer import Family
from connectors.extraction.limits import Limits
from connectors.extraction.result import Unreadable

_MAIN_TYPES: tuple[tuple[bytes, Family], ...] = (
    (b"wordprocessingml.document.main+xml", "word"),
    (b"presentationml.presentation.main+xml", "slides"),
    (b"presentationml.slideshow.main+xml", "slides"),
    (b"presentationml.template.main+xml", "slides"),
    (b"ms-powerpoint.presentation.macroEnabled.main+xml", "slides"),
    (b"spreadsheetml.sheet.main+xml", "sheets"),
    (b"spreadsheetml.template.main+xml", "sheets"),
    (b"ms-excel.sheet.macroEnabled.main+xml", "sheets"),
)
"""Content types of main parts (ECMA-376 Part 1, annex on content types; the macroEnabled ones: [MS-OFFMACRO])."""
_CONTENT_TYPES = "[Content_Types].xml"
_MAX_CONTENT_TYPES_BYTES = 8 * 1024**2
_ENCRYPTED_FLAG = 0x1
_XML_ENDINGS = (".xml", ".rels", ".vml")
_DOCTYPE = b"<!doctype"
_DECLARATIONS = (b"<!entity", b"<!attlist", b"<!element", b"<!notation")
"""Declarations in a document type that change a text; nothing else in markup begins like this."""
_LONGEST_DECLARATION = max(map(len, (_DOCTYPE, *_DECLARATIONS)))
_BLOCK_BYTES = 256 * 1024
_BEFORE_MARKUP = b"\xef\xbb\xbf\xff\xfe \t\r\n"
"""Byte order marks and white space: an XML parser takes nothing else before the first ``<``."""
_EBCDIC = b"\x4c\x6f\xa7\x94"
"""``<?xm`` in EBCDIC, by which parsers recognise that encoding (XML 1.0, appendix F)."""
_XML_DECLARATION = re.compile(rb"<\?xml\s(.{0,1000}?)\?>", re.DOTALL)
_ENCODING = re.compile(rb"""\bencoding\s*=\s*["']\s*([^"']*?)\s*["']""")
_READABLE = re.compile(rb"utf-?(?:8|16|32)(?:[bl]e)?|(?:us-)?ascii|iso[-_]8859-\d+|latin-?1|windows-125\d")
"""Encodings in which a declaration has the bytes of ASCII, apart from zeros. UTF-7, EBCDIC and ISO 2022 are none."""


def family_of(file: IO[bytes], limits: Limits) -> Family:
    """Check an Office file and return its family. Raises Unreadable: truncated, broken, encrypted, bomb, unsupported.

    Files in it that are archives themselves (embedded workbooks) are never opened, so that nesting costs nothing.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            _check_sizes(entries, limits)
            _check_overlap(entries)
            if any(entry.flag_bits & _ENCRYPTED_FLAG for entry in entries):
                raise Unreadable("encrypted", "is protected by a password: save it without one")
            family = _family(archive)
            for entry in entries:
                _check_markup(archive, entry)
            return family
    except zipfile.BadZipFile as error:
        raise _damaged(file) from error
    except (NotImplementedError, RuntimeError) as error:  # compression methods or flags that no Office file has
        raise Unreadable("broken", "is packed in a way that Office files never are") from error


def _damaged(file: IO[bytes]) -> Unreadable:
    """Tell an incomplete file from a damaged one: a zip's directory is at its end."""
    file.seek(0)
    if b"PK\x05\x06" not in file.read()[-66_000:]:
        return Unreadable("truncated", "is incomplete (its end is missing): copy or upload it again")
    return Unreadable("broken", "is a damaged Office file")


def _check_sizes(entries: list[zipfile.ZipInfo], limits: Limits) -> None:
    """Check the sizes that the directory declares. Readers unpack no more of an entry than that."""
    if len(entries) > limits.zip_entries:
        raise Unreadable("bomb", f"holds {len(entries):,} parts, the limit is {limits.zip_entries:,}")
    total = sum(entry.file_size for entry in entries)
    if total > limits.zip_bytes:
        raise Unreadable("bomb", f"would unpack to {total:,} bytes, the limit is {limits.zip_bytes:,}")
    for entry in entries:
        if entry.file_size > limits.zip_grace_bytes and entry.file_size > limits.zip_ratio * entry.compress_size:
            ratio = entry.file_size // max(entry.compress_size, 1)
            raise Unreadable("bomb", f"holds a part packed {ratio}:1, the limit is {limits.zip_ratio}:1")


def _check_overlap(entries: list[zipfile.ZipInfo]) -> None:
    """Refuse entries that share bytes, by which a small zip unpacks to any size."""
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        if entry.header_offset < end:
            raise Unreadable("bomb", "holds parts that overlap, as no Office program writes them")
        end = entry.header_offset + 30 + entry.compress_size  # 30: a local header without its names


def _family(archive: zipfile.ZipFile) -> Family:
    try:
        entry = archive.getinfo(_CONTENT_TYPES)
    except KeyError as error:
        raise Unreadable("unsupported", "is a zip archive, not an Office file: unpack it") from error
    if entry.file_size > _MAX_CONTENT_TYPES_BYTES:
        raise Unreadable("bomb", "holds a list of contents of more than 8 MB")
    types = archive.read(entry)
    for content_type, family in _MAIN_TYPES:
        if content_type in types:
            return family
    raise Unreadable("unsupported", "is an Office file of another kind: save it as .docx, .pptx or .xlsx")


def _check_markup(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Refuse a DTD, which could define entities: Office files hold none (ECMA-376 Part 2 forbids it). Any part may be
    read as XML, because relationships and content types say what a part is, not its name. Pictures and the like are
    recognised by their first byte. A web page or a drawing in an Office file may name its document type, but declare
    nothing."""
    refused: tuple[bytes, ...] = _DECLARATIONS
    if entry.filename.lower().endswith(_XML_ENDINGS):
        refused = (_DOCTYPE, *_DECLARATIONS)
    with archive.open(entry) as part:
        block = part.read(_BLOCK_BYTES)
        seen = _as_ascii(block).lstrip(_BEFORE_MARKUP)
        if block.startswith(_EBCDIC) or not _is_readable(seen):
            raise Unreadable("broken", "is written in an encoding that Office files never have")
        if seen and not seen.startswith(b"<"):
            return
        while block:
            if any(declaration in seen for declaration in refused):
                raise Unreadable("bomb", "holds a document type declaration, which Office files never do")
            block = part.read(_BLOCK_BYTES)
            seen = seen[-_LONGEST_DECLARATION:] + _as_ascii(block)


def _as_ascii(block: bytes) -> bytes:
    """Return the bytes in lower case and without zeros, so that UTF-16 and UTF-32 are searched like ASCII."""
    return block.replace(b"\x00", b"").lower()


def _is_readable(start: bytes) -> bool:
    if not start.startswith(b"<?xml"):
        return True
    if (declaration := _XML_DECLARATION.match(start)) is None:
        return False
    encoding = _ENCODING.search(declaration[1])
    return encoding is None or _READABLE.fullmatch(encoding[1]) is not None
