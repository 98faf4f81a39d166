"""Files made to break their reader, and files that are merely broken. Each builder returns the file's bytes; none is
larger than a few megabytes."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import docx
import openpyxl

from tests.pdf_files import encrypted_pdf, pdf_file, pdf_of, stream

MEGABYTE = 1024**2


@dataclass(frozen=True)
class Hostile:
    name: str
    """As it is uploaded."""
    build: Callable[[], bytes]
    ends_as: frozenset[str]
    """The codes that say truly what it is; "text" where it is harmless and is read."""


# PDF


def _page_with(contents: bytes, *more: bytes, resources: str = "<< /Font << /F1 3 0 R >> >>") -> bytes:
    return pdf_file(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [5 0 R] /Count 1 >>",
            b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
            b"<< /Title (t) >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 6 0 R /Resources %s >>"
            % resources.encode(),
            contents,
            *more,
        ]
    )


def inflating_pdf() -> bytes:
    """A page whose 30 KB of instructions unpack, twice, to 4 GB of spaces."""
    return _page_with(stream(zlib.compress(_spaces_packed(4096), 9), "/Filter [/FlateDecode /FlateDecode]"))


def _spaces_packed(megabytes: int) -> bytes:
    """Packed once and repeated: blocks that end with a full flush do not refer to each other."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(b" " * MEGABYTE) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x78\xda" + block * megabytes + packer.flush()


def multiplying_pdf() -> bytes:
    """Ten forms, each drawing the next one ten times: 10,000,000,000 times the same word."""
    forms = []
    for n in range(10):
        draws = b"/X Do " * 10 if n < 9 else b"BT /F1 12 Tf 72 720 Td (Ha) Tj ET"
        inner = f"<< /XObject << /X {8 + n} 0 R >> >>" if n < 9 else "<< /Font << /F1 3 0 R >> >>"
        forms.append(stream(draws, f"/Type /XObject /Subtype /Form /BBox [0 0 612 792] /Resources {inner}"))
    return _page_with(stream(b"/X Do"), *forms, resources="<< /XObject << /X 7 0 R >> >>")


def self_drawing_pdf() -> bytes:
    form = stream(b"/X Do", "/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 7 0 R >> >>")
    return _page_with(stream(b"/X Do"), form, resources="<< /XObject << /X 7 0 R >> >>")


def nested_pdf() -> bytes:
    """A million opening brackets where a page's contents should be."""
    return _page_with(b"[" * 1_000_000)


def nested_instructions_pdf() -> bytes:
    return _page_with(stream(b"[" * 500_000 + b"<<" * 500_000 + b" TJ"))


def endless_index_pdf() -> bytes:
    """An index that claims two thousand million objects, and names itself as the one before it."""
    data = pdf_of(["text"])
    body, at = data.rsplit(b"xref\n", 1)[0].rsplit(b"xref\n", 1)[0], data.rindex(b"xref\n0")
    body = data[:at]
    return (
        body + b"xref\n0 2147483647\n0000000000 65535 f \n"
        b"trailer\n<< /Size 2147483647 /Root 1 0 R /Prev %d >>\nstartxref\n%d\n%%%%EOF\n" % (at, at)
    )  # fmt: skip


def endless_index_stream_pdf() -> bytes:
    """The same as a compressed index, with objects said to lie in it that are not there."""
    at = 9
    packed = zlib.compress(b"\x01\x00\x00\x09\x00" * 200_000)
    head = (
        "/Type /XRef /W [1 3 1] /Index [0 2000000000] /Size 2000000000 /Root 1 0 R /Filter /FlateDecode"
        f" /Prev {at} /DecodeParms << /Columns 2147483647 /Predictor 12 /Colors 32 >>"
    )
    return b"%PDF-1.5\n" + b"1 0 obj\n" + stream(packed, head) + b"\nendobj\nstartxref\n%d\n%%%%EOF\n" % at


def many_pages_pdf() -> bytes:
    """100,000 pages, all the same object."""
    kids = b"5 0 R " * 100_000
    return pdf_file(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [%s] /Count 100000 >>" % kids,
            b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
            b"<< /Title (t) >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 6 0 R /Resources << >> >>",
            stream(b""),
        ]
    )


def looping_pages_pdf() -> bytes:
    """A page tree that is its own child."""
    return pdf_file(
        [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [2 0 R 2 0 R] /Count 2000 /Parent 2 0 R >>"]
    )


def huge_picture_pdf() -> bytes:
    """A picture of 65,000 × 65,000 pixels, from 4 MB."""
    picture = stream(
        _spaces_packed(2048),
        "/Type /XObject /Subtype /Image /Width 65000 /Height 65000 /ColorSpace /DeviceRGB /BitsPerComponent 8"
        " /Filter /FlateDecode",
    )
    return _page_with(stream(b"q 612 0 0 792 0 0 cm /I Do Q"), picture, resources="<< /XObject << /I 7 0 R >> >>")


def flooding_pdf() -> bytes:
    """One page with thirty million letters."""
    text = zlib.compress(b"BT /F1 9 Tf 72 720 Td " + b"(aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa) Tj " * 1_000_000 + b"ET", 9)
    return _page_with(stream(text, "/Filter /FlateDecode"))


def ruled_pdf() -> bytes:
    """A page ruled so densely that looking for cells would take for ever."""
    rules = "".join(
        f"{n * 0.15:.2f} 0 m {n * 0.15:.2f} 792 l S 0 {n * 0.15:.2f} m 612 {n * 0.15:.2f} l S " for n in range(2400)
    )
    return _page_with(stream(b"BT /F1 9 Tf 72 720 Td (words enough to read here) Tj ET " + rules.encode()))


def damaged_pdf() -> bytes:
    """Random bytes overwritten, as a failing disk does."""
    data = bytearray(pdf_of(["one page of text", "and another one"]))
    dice = random.Random(7)
    for _ in range(len(data) // 4):
        data[dice.randrange(9, len(data))] = dice.randrange(256)
    return bytes(data)


# Office


def _docx() -> bytes:
    made = io.BytesIO()
    document = docx.Document()
    document.add_paragraph("Harmless words.")
    document.save(made)
    return made.getvalue()


def _xlsx() -> bytes:
    made = io.BytesIO()
    book = openpyxl.Workbook()
    book.active["A1"] = "words"  # type: ignore[index]
    book.save(made)
    return made.getvalue()


def repacked(data: bytes, changes: Mapping[str, bytes]) -> bytes:
    """A zip with parts replaced or added."""
    made = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        for entry in old.infolist():
            if entry.filename not in changes:
                new.writestr(entry.filename, old.read(entry))
        for name, content in changes.items():
            new.writestr(name, content)
    return made.getvalue()


def _body(content: bytes, before: bytes = b"") -> bytes:
    return (
        b'<?xml version="1.0" encoding="UTF-8"?>' + before
        + b'<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>'
        + content + b"</w:body></w:document>"
    )  # fmt: skip


def inflating_docx() -> bytes:
    """100 MB of text in 100 KB."""
    return repacked(
        _docx(), {"word/document.xml": _body(b"<w:p><w:r><w:t>" + b"a" * 100 * MEGABYTE + b"</w:t></w:r></w:p>")}
    )


def picture_bomb_docx() -> bytes:
    """Not in the text, but in a picture beside it."""
    return repacked(_docx(), {"word/media/a.png": b"\x00" * 50 * MEGABYTE})


def overlapping_docx() -> bytes:
    """A hundred names for the same packed bytes."""
    data = repacked(_docx(), {"word/media/a.bin": random.Random(1).randbytes(MEGABYTE)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        start = archive.start_dir
    last = max(entries, key=lambda entry: entry.header_offset)
    directory = data[start : data.rindex(b"PK\x05\x06")]
    extra = b"".join(
        struct.pack(
            "<4s6H3L5H2L", b"PK\x01\x02", 20, 20, 0, last.compress_type, 0, 0, last.CRC, last.compress_size,
            last.file_size, 9, 0, 0, 0, 0, 0, last.header_offset,
        ) + b"b%04d.bin" % n
        for n in range(100)
    )  # fmt: skip
    end = struct.pack(
        "<4s4H2LH", b"PK\x05\x06", 0, 0, len(entries) + 100, len(entries) + 100, len(directory + extra), start, 0
    )
    return data[:start] + directory + extra + end


def many_parts_docx() -> bytes:
    return repacked(_docx(), {f"word/media/{n}": b"" for n in range(20_000)})


def laughing_docx() -> bytes:
    """Entities of entities: a billion laughs."""
    entities = b'<!ENTITY a0 "ha">' + b"".join(
        b'<!ENTITY a%d "%s">' % (n, b"&a%d;" % (n - 1) * 10) for n in range(1, 10)
    )  # fmt: skip
    dtd = b"<!DOCTYPE d [" + entities + b"]>"
    return repacked(_docx(), {"word/document.xml": _body(b"<w:p><w:r><w:t>&a9;</w:t></w:r></w:p>", dtd)})


def reading_docx(secret: str = "file:///etc/passwd") -> bytes:
    """Asks for another file's content (XXE), in UTF-16 so that a search for the letters misses it."""
    dtd = b'<!DOCTYPE d [<!ENTITY x SYSTEM "%s">]>' % secret.encode()
    xml = _body(b"<w:p><w:r><w:t>&x;</w:t></w:r></w:p>", dtd).replace(b"UTF-8", b"UTF-16")
    return repacked(_docx(), {"word/document.xml": xml.decode().encode("utf-16")})


def fetching_docx(address: str) -> bytes:
    """A template, a picture and a frame on another machine."""
    kind = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/"
    with zipfile.ZipFile(io.BytesIO(_docx())) as archive:
        rels = archive.read("word/_rels/document.xml.rels")
    more = "".join(
        f'<Relationship Id="x{n}" Type="{kind}{what}" Target="{address}/{what}" TargetMode="External"/>'
        for n, what in enumerate(("attachedTemplate", "image", "frame", "footnotes", "numbering", "hyperlink"))
    )
    return repacked(
        _docx(),
        {"word/_rels/document.xml.rels": rels.replace(b"</Relationships>", more.encode() + b"</Relationships>")},
    )


def nested_docx() -> bytes:
    deep = b"<w:ins>" * 50_000 + b"<w:p/>" + b"</w:ins>" * 50_000
    return repacked(_docx(), {"word/document.xml": _body(deep)})


def zip_of_zips() -> bytes:
    inner = repacked(_docx(), {})
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for n in range(20):
            archive.writestr(f"{n}.zip", inner)
    return made.getvalue()


def encrypted_docx() -> bytes:
    """The container in which Office puts an encrypted file; what tells it apart are the names of its streams."""
    return b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\x00" * 504 + "EncryptedPackage".encode("utf-16-le") + b"\x00" * 512


def _sheet(rows: bytes) -> bytes:
    return (
        b'<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><dimension ref="A1:XFD1048576"/>'
        b"<sheetData>" + rows + b"</sheetData></worksheet>"
    )


def far_corner_xlsx() -> bytes:
    """One cell, in the last corner of the sheet."""
    rows = b'<row r="1048576"><c r="XFD1048576" t="inlineStr"><is><t>far away</t></is></c></row>'
    return repacked(_xlsx(), {"xl/worksheets/sheet1.xml": _sheet(rows)})


def repeating_xlsx() -> bytes:
    """20,000 cells that share one text of 900 KB."""
    strings = (
        b'<sst xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><si><t>'
        + random.Random(3).randbytes(450_000).hex().encode() + b"</t></si></sst>"
    )  # fmt: skip
    rows = b"".join(b'<row r="%d"><c t="s"><v>0</v></c></row>' % n for n in range(1, 20_000))
    with zipfile.ZipFile(io.BytesIO(_xlsx())) as archive:
        types = archive.read("[Content_Types].xml")
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
    more = f'<Override PartName="/xl/sharedStrings.xml" ContentType="{kind}"/></Types>'.encode()
    changes = {
        "xl/sharedStrings.xml": strings, "xl/worksheets/sheet1.xml": _sheet(rows),
        "[Content_Types].xml": types.replace(b"</Types>", more),
    }  # fmt: skip
    return repacked(_xlsx(), changes)


def inflating_xlsx() -> bytes:
    """Two million rows in 130 KB."""
    return repacked(_xlsx(), {"xl/worksheets/sheet1.xml": _sheet(b"<row><c><v>1</v></c></row>" * 2_000_000)})


# Mail


def nested_eml() -> bytes:
    """Ten thousand parts, each within the one before."""
    head = b"From: a@example.org\nSubject: s\nMIME-Version: 1.0\n"
    parts = [b'Content-Type: multipart/mixed; boundary="b%d"\n\n--b%d\n' % (n, n) for n in range(10_000)]
    return head + b"".join(parts) + b"Content-Type: text/plain\n\ndeep\n"


def flooding_eml() -> bytes:
    return b"".join(b"X-%d: =?utf-8?q?=61?= <a@b>, \n" % n for n in range(100_000)) + b"Subject: s\n\nThe text.\n"


HOSTILE = [
    Hostile("inflating.pdf", inflating_pdf, frozenset({"too_much_memory", "crashed", "broken", "needs_ocr"})),
    Hostile("multiplying.pdf", multiplying_pdf, frozenset({"too_slow", "too_much_memory", "too_large"})),
    Hostile("self-drawing.pdf", self_drawing_pdf, frozenset({"needs_ocr"})),
    Hostile("nested.pdf", nested_pdf, frozenset({"needs_ocr", "broken"})),
    Hostile("nested-instructions.pdf", nested_instructions_pdf, frozenset({"needs_ocr", "broken"})),
    Hostile("endless-index.pdf", endless_index_pdf, frozenset({"text", "broken"})),
    Hostile("endless-index-stream.pdf", endless_index_stream_pdf, frozenset({"broken"})),
    Hostile("many-pages.pdf", many_pages_pdf, frozenset({"too_large"})),
    Hostile("looping-pages.pdf", looping_pages_pdf, frozenset({"broken", "empty"})),
    Hostile("huge-picture.pdf", huge_picture_pdf, frozenset({"needs_ocr"})),
    Hostile("flooding.pdf", flooding_pdf, frozenset({"too_large", "too_slow", "too_much_memory"})),
    Hostile("ruled.pdf", ruled_pdf, frozenset({"text"})),
    Hostile("damaged.pdf", damaged_pdf, frozenset({"broken", "truncated", "needs_ocr"})),
    Hostile("encrypted.pdf", encrypted_pdf, frozenset({"encrypted"})),
    Hostile("truncated.pdf", lambda: pdf_of(["text"] * 20)[:-700], frozenset({"truncated"})),
    Hostile("inflating.docx", inflating_docx, frozenset({"bomb"})),
    Hostile("pictures.docx", picture_bomb_docx, frozenset({"bomb"})),
    Hostile("overlapping.docx", overlapping_docx, frozenset({"bomb"})),
    Hostile("many-parts.docx", many_parts_docx, frozenset({"bomb"})),
    Hostile("laughing.docx", laughing_docx, frozenset({"bomb"})),
    Hostile("reading.docx", reading_docx, frozenset({"bomb"})),
    Hostile("nested.docx", nested_docx, frozenset({"broken", "bomb"})),
    Hostile("zips.docx", zip_of_zips, frozenset({"unsupported"})),
    Hostile("zips-without-ending", zip_of_zips, frozenset({"unsupported"})),
    Hostile("encrypted.docx", encrypted_docx, frozenset({"encrypted"})),
    Hostile("truncated.docx", lambda: _docx()[:-2000], frozenset({"truncated"})),
    Hostile("text.docx", lambda: b"only text", frozenset({"broken"})),
    Hostile("far-corner.xlsx", far_corner_xlsx, frozenset({"text"})),
    Hostile("repeating.xlsx", repeating_xlsx, frozenset({"text"})),
    Hostile("inflating.xlsx", inflating_xlsx, frozenset({"bomb"})),
    Hostile("nested.eml", nested_eml, frozenset({"bomb", "text"})),
    Hostile("flooding.eml", flooding_eml, frozenset({"text"})),
]
