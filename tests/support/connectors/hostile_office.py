"""Office and mail files made to break their reader. None is larger than a few megabytes."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from collections.abc import Mapping

import docx
import openpyxl

MEGABYTE = 1024**2


def plain_docx() -> bytes:
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
        b'<?xml version="1.0" encoding="UTF-8"?>'
        + before
        + b'<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>'
        + content
        + b"</w:body></w:document>"
    )


def inflating_docx() -> bytes:
    """100 MB of text in 100 KB."""
    return repacked(
        plain_docx(), {"word/document.xml": _body(b"<w:p><w:r><w:t>" + b"a" * 100 * MEGABYTE + b"</w:t></w:r></w:p>")}
    )


def picture_bomb_docx() -> bytes:
    """Not in the text, but in a picture beside it."""
    return repacked(plain_docx(), {"word/media/a.png": b"\x00" * 50 * MEGABYTE})


def overlapping_docx() -> bytes:
    """A hundred names for the same packed bytes."""
    data = repacked(plain_docx(), {"word/media/a.bin": random.Random(1).randbytes(MEGABYTE)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        start = archive.start_dir
    last = max(entries, key=lambda entry: entry.header_offset)
    directory = data[start : data.rindex(b"PK\x05\x06")]
    extra = b"".join(
        struct.pack(
            "<4s6H3L5H2L",
            b"PK\x01\x02",
            20,
            20,
            0,
            last.compress_type,
            0,
            0,
            last.CRC,
            last.compress_size,
            last.file_size,
            9,
            0,
            0,
            0,
            0,
            0,
            last.header_offset,
        )
        + b"b%04d.bin" % n
        for n in range(100)
    )
    end = struct.pack(
        "<4s4H2LH", b"PK\x05\x06", 0, 0, len(entries) + 100, len(entries) + 100, len(directory + extra), start, 0
    )
    return data[:start] + directory + extra + end


def many_parts_docx() -> bytes:
    return repacked(plain_docx(), {f"word/media/{n}": b"" for n in range(20_000)})


def laughing_docx() -> bytes:
    """Entities of entities: a billion laughs."""
    entities = b'<!ENTITY a0 "ha">' + b"".join(
        b'<!ENTITY a%d "%s">' % (n, b"&a%d;" % (n - 1) * 10) for n in range(1, 10)
    )
    dtd = b"<!DOCTYPE d [" + entities + b"]>"
    return repacked(plain_docx(), {"word/document.xml": _body(b"<w:p><w:r><w:t>&a9;</w:t></w:r></w:p>", dtd)})


def reading_docx(secret: str = "file:///etc/passwd") -> bytes:
    """Asks for another file's content (XXE), in UTF-16 so that a search for the letters misses it."""
    dtd = b'<!DOCTYPE d [<!ENTITY x SYSTEM "%s">]>' % secret.encode()
    xml = _body(b"<w:p><w:r><w:t>&x;</w:t></w:r></w:p>", dtd).replace(b"UTF-8", b"UTF-16")
    return repacked(plain_docx(), {"word/document.xml": xml.decode().encode("utf-16")})


_SHEET = (
    "<worksheet xmlns='http://schemas.openxmlformats.org/spreadsheetml/2006/main'><sheetData><row r='1'>"
    "<c r='A1' t='inlineStr'><is><t>{}</t></is></c></row></sheetData></worksheet>"
)


def misnamed_xlsx(encoding: str = "utf-8") -> bytes:
    """Entities in a sheet whose name is that of a picture: the relationships say what it is."""
    dtd = '<!DOCTYPE d [<!ENTITY a "hahaha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    data = _xlsx()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        rels = archive.read("xl/_rels/workbook.xml.rels").replace(b"worksheets/sheet1.xml", b"media/image1.png")
        types = archive.read("[Content_Types].xml").replace(b"worksheets/sheet1.xml", b"media/image1.png")
    sheet = f"<?xml version='1.0' encoding='{encoding}'?>".encode() + (dtd + _SHEET.format("&b;")).encode(encoding)
    return repacked(
        data, {"xl/_rels/workbook.xml.rels": rels, "[Content_Types].xml": types, "xl/media/image1.png": sheet}
    )


def fetching_docx(address: str) -> bytes:
    """A template, a picture and a frame on another machine."""
    kind = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/"
    with zipfile.ZipFile(io.BytesIO(plain_docx())) as archive:
        rels = archive.read("word/_rels/document.xml.rels")
    more = "".join(
        f'<Relationship Id="x{n}" Type="{kind}{what}" Target="{address}/{what}" TargetMode="External"/>'
        for n, what in enumerate(("attachedTemplate", "image", "frame", "footnotes", "numbering", "hyperlink"))
    )
    return repacked(
        plain_docx(),
        {"word/_rels/document.xml.rels": rels.replace(b"</Relationships>", more.encode() + b"</Relationships>")},
    )


def nested_docx() -> bytes:
    deep = b"<w:ins>" * 50_000 + b"<w:p/>" + b"</w:ins>" * 50_000
    return repacked(plain_docx(), {"word/document.xml": _body(deep)})


def zip_of_zips() -> bytes:
    inner = repacked(plain_docx(), {})
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for n in range(20):
            archive.writestr(f"{n}.zip", inner)
    return made.getvalue()


def encrypted_docx() -> bytes:
    """The container in which Office puts an encrypted file; what tells it apart are the names of its streams."""
    return b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\x00" * 504 + "EncryptedPackage".encode("utf-16-le") + b"\x00" * 512


def sheet_xml(rows: bytes) -> bytes:
    return (
        b'<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><dimension ref="A1:XFD1048576"/>'
        b"<sheetData>" + rows + b"</sheetData></worksheet>"
    )


def far_corner_xlsx() -> bytes:
    """One cell, in the last corner of the sheet."""
    rows = b'<row r="1048576"><c r="XFD1048576" t="inlineStr"><is><t>far away</t></is></c></row>'
    return repacked(_xlsx(), {"xl/worksheets/sheet1.xml": sheet_xml(rows)})


def repeating_xlsx() -> bytes:
    """20,000 cells that share one text of 900 KB."""
    strings = (
        b'<sst xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><si><t>'
        + random.Random(3).randbytes(450_000).hex().encode()
        + b"</t></si></sst>"
    )
    rows = b"".join(b'<row r="%d"><c t="s"><v>0</v></c></row>' % n for n in range(1, 20_000))
    with zipfile.ZipFile(io.BytesIO(_xlsx())) as archive:
        types = archive.read("[Content_Types].xml")
    kind = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
    more = f'<Override PartName="/xl/sharedStrings.xml" ContentType="{kind}"/></Types>'.encode()
    changes = {
        "xl/sharedStrings.xml": strings,
        "xl/worksheets/sheet1.xml": sheet_xml(rows),
        "[Content_Types].xml": types.replace(b"</Types>", more),
    }
    return repacked(_xlsx(), changes)


def inflating_xlsx() -> bytes:
    """Two million rows in 130 KB."""
    return repacked(_xlsx(), {"xl/worksheets/sheet1.xml": sheet_xml(b"<row><c><v>1</v></c></row>" * 2_000_000)})


# Mail


def nested_eml() -> bytes:
    """Ten thousand parts, each within the one before."""
    head = b"From: a@example.org\nSubject: s\nMIME-Version: 1.0\n"
    parts = [b'Content-Type: multipart/mixed; boundary="b%d"\n\n--b%d\n' % (n, n) for n in range(10_000)]
    return head + b"".join(parts) + b"Content-Type: text/plain\n\ndeep\n"


def flooding_eml() -> bytes:
    return b"".join(b"X-%d: =?utf-8?q?=61?= <a@b>, \n" % n for n in range(100_000)) + b"Subject: s\n\nThe text.\n"
