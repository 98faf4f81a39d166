"""Whether a zip of XML may be opened: looked at before any library unpacks it."""

from __future__ import annotations

import zipfile
from typing import IO, Literal

from connectors.extraction.limits import Limits
from connectors.extraction.unreadable import Unreadable

Family = Literal["word", "slides", "sheets"]

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
_MAX_CONTENT_TYPES = 8 * 1024**2
_ENCRYPTED_FLAG = 0x1
_DTD = b"<!doctype"
_BLOCK = 256 * 1024


def checked(file: IO[bytes], limits: Limits) -> Family:
    """Which family of Office file it is. Raises Unreadable: truncated, broken, encrypted, bomb, too_large, unsupported.

    Files within it that are archives themselves (embedded workbooks) are never opened, so that nesting costs nothing.
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
                if entry.filename.lower().endswith((".xml", ".rels", ".vml")):
                    _check_xml(archive, entry)
            return family
    except zipfile.BadZipFile as error:
        raise _damaged(file) from error
    except (NotImplementedError, RuntimeError) as error:  # compression methods or flags that no Office file has
        raise Unreadable("broken", "is packed in a way that Office files never are") from error


def _damaged(file: IO[bytes]) -> Unreadable:
    """The directory stands at the end of a zip: without it the end is missing."""
    file.seek(0)
    if b"PK\x05\x06" not in file.read()[-66_000:]:
        return Unreadable("truncated", "is incomplete (its end is missing): copy or upload it again")
    return Unreadable("broken", "is a damaged Office file")


def _check_sizes(entries: list[zipfile.ZipInfo], limits: Limits) -> None:
    """By the sizes that the directory declares: nothing unpacks more than that of an entry."""
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
    """Entries that share bytes are how a small zip unpacks to any size."""
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
    if entry.file_size > _MAX_CONTENT_TYPES:
        raise Unreadable("bomb", "holds a list of contents of more than 8 MB")
    types = archive.read(entry)
    for content_type, family in _MAIN_TYPES:
        if content_type in types:
            return family
    raise Unreadable("unsupported", "is an Office file of another kind: save it as .docx, .pptx or .xlsx")


def _check_xml(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Office files hold no DTD (ECMA-376 Part 2 forbids it), which is where entities come from."""
    tail = b""
    with archive.open(entry) as part:
        while block := part.read(_BLOCK):
            seen = tail + block.replace(b"\x00", b"").lower()  # UTF-16 without its zeros is searched alike
            if _DTD in seen:
                raise Unreadable("bomb", "holds a document type declaration, which Office files never do")
            tail = seen[-len(_DTD) :]
