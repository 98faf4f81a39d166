"""PDFs written by hand, for tests."""

from __future__ import annotations

from collections.abc import Sequence


def pdf_of(pages: Sequence[str], *, title: str = "", author: str = "") -> bytes:
    """One line of Latin text a page; "" is a page without any."""
    return _file(_objects(pages, title, author))


def encrypted_pdf() -> bytes:
    """Its password is nobody's: the check values are arbitrary."""
    encrypt = f"<< /Filter /Standard /V 1 /R 2 /O <{'41' * 32}> /U <{'42' * 32}> /P -4 >>"
    objects = [*_objects(["secret"], "", ""), encrypt.encode()]
    return _file(objects, f"/Encrypt {len(objects)} 0 R /ID [<{'43' * 16}> <{'43' * 16}>]")


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


def _file(objects: Sequence[bytes], trailer: str = "") -> bytes:
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
