"""PDFs written by hand, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def pdf_of(pages: Sequence[str], *, title: str = "", author: str = "") -> bytes:
    """One line of Latin text a page; "" is a page without any."""
    return pdf_file(_objects(pages, title, author))


def encrypted_pdf() -> bytes:
    """Its password is nobody's: the check values are arbitrary."""
    encrypt = f"<< /Filter /Standard /V 1 /R 2 /O <{'41' * 32}> /U <{'42' * 32}> /P -4 >>"
    objects = [*_objects(["secret"], "", ""), encrypt.encode()]
    return pdf_file(objects, f"/Encrypt {len(objects)} 0 R /ID [<{'43' * 16}> <{'43' * 16}>]")


def _objects(pages: Sequence[str], title: str, author: str) -> list[bytes]:
    kids = " ".join(f"{5 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        f"<< /Title ({title}) /Author ({author}) >>".encode(),
    ]
    for n, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode("latin-1") if text else b""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {6 + 2 * n} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>".encode()
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
    return objects


def pdf_file(objects: Sequence[bytes], trailer: str = "") -> bytes:
    body = b"%PDF-1.4\n"
    offsets = []
    for number, content in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    return (
        body
        + (
            f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
            f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R /Info 4 0 R {trailer} >>\n"
            f"startxref\n{len(body)}\n%%EOF\n"
        ).encode()
    )


@dataclass(frozen=True)
class Line:
    """Text whose baseline starts at (x, y), in points from the bottom left corner."""

    x: float
    y: float
    text: str
    size: float = 10
    bold: bool = False


@dataclass
class Sheet:
    """A page of 612 × 792 points."""

    lines: list[Line] = field(default_factory=list)
    rules: list[tuple[float, float, float, float]] = field(default_factory=list)
    """Straight lines (x0, y0, x1, y1)."""
    picture: bool = False
    """Over the whole page, as a scanner makes it."""
    rotate: int = 0

    def grid(
        self, x: float, y: float, widths: Sequence[float], rows: Sequence[Sequence[str]], height: float = 20
    ) -> None:
        """A ruled table whose top left corner is at (x, y)."""
        right, bottom = x + sum(widths), y - height * len(rows)
        self.rules += [(x, y - height * n, right, y - height * n) for n in range(len(rows) + 1)]
        self.rules += [(at, y, at, bottom) for at in (x + sum(widths[:n]) for n in range(len(widths) + 1))]
        for down, row in enumerate(rows):
            for across, text in enumerate(row):
                self.lines.append(Line(x + sum(widths[:across]) + 4, y - height * down - 14, text))

    def content(self) -> bytes:
        parts = ["q 612 0 0 792 0 0 cm /I1 Do Q"] if self.picture else []
        parts += [f"{x0} {y0} m {x1} {y1} l S" for x0, y0, x1, y1 in self.rules]
        parts += [
            f"BT /F{2 if line.bold else 1} {line.size} Tf {line.x} {line.y} Td ({_escaped(line.text)}) Tj ET"
            for line in self.lines
        ]
        return "\n".join(parts).encode("cp1252")


def typeset(sheets: Sequence[Sheet], *, title: str = "") -> bytes:
    """Helvetica, regular and bold; a grey pixel as the picture."""
    fixed = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{' '.join(f'{8 + 2 * n} 0 R' for n in range(len(sheets)))}]"
        f" /Count {len(sheets)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        f"<< /Title ({title}) /Author () >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica-Bold /Encoding /WinAnsiEncoding >>",
        b"<< /Type /XObject /Subtype /Image /Width 1 /Height 1 /ColorSpace /DeviceGray /BitsPerComponent 8 /Length 1 >>"
        b"\nstream\n\x80\nendstream",
        b"<< /Font << /F1 3 0 R /F2 5 0 R >> /XObject << /I1 6 0 R >> >>",
    ]
    pages = [
        part
        for n, sheet in enumerate(sheets)
        for part in (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Rotate {sheet.rotate} /Contents {9 + 2 * n} 0 R"
            " /Resources 7 0 R >>".encode(),
            stream(sheet.content()),
        )
    ]
    return pdf_file([*fixed, *pages])


def stream(content: bytes, more: str = "") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), more.encode(), content)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
