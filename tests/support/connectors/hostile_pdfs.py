"""PDFs made to break their reader. None is larger than a few megabytes."""

from __future__ import annotations

import random
import zlib

from tests.support.connectors.pdf_files import pdf_file, pdf_of, stream

MEGABYTE = 1024**2


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
    )


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
