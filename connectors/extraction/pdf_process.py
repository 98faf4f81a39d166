"""Reads one PDF from standard input and prints what it holds as JSON: {"text", "title", "author", "pages"}, or
{"code", "message"}.

A program of its own: pdfium is not thread-safe, and a hostile file may crash it or never end.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import suppress

import pypdfium2
from pypdfium2.raw import FPDF_ERR_PASSWORD

LINE_END_HYPHEN = ("\x02\r\n", "\x02", "\ufffe\r\n", "\ufffe")
"""How pdfium marks a word that was divided at the end of a line."""


def limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Where the system knows these limits."""
    for what, most in ((resource.RLIMIT_CPU, cpu_seconds), (resource.RLIMIT_AS, memory_bytes)):
        with suppress(ValueError, OSError):
            resource.setrlimit(what, (most, most))


def read(data: bytes, max_chars: int) -> dict[str, object]:
    try:
        pdf = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if getattr(error, "err_code", None) == FPDF_ERR_PASSWORD:
            return {"code": "encrypted", "message": "is a PDF that needs a password"}
        return {"code": "broken", "message": "is not a PDF that can be opened (damaged or incomplete)"}
    pages: list[str] = []
    size = 0
    for page in pdf:
        text = page.get_textpage().get_text_range()
        for mark in LINE_END_HYPHEN:
            text = text.replace(mark, "")
        pages.append(text.replace("\r\n", "\n").replace("\x00", "").strip())
        size += len(pages[-1])
        if size > max_chars:
            return {"code": "too_large", "message": f"is a PDF with more than {max_chars} characters of text"}
    about = pdf.get_metadata_dict()
    if sum(len(page) for page in pages) < len(pages):
        return {"code": "needs_ocr", "message": f"is a PDF of {len(pages)} pages without text (scanned?): it needs OCR"}
    return {
        "text": "\n\n".join(page for page in pages if page), "title": about.get("Title", ""),
        "author": about.get("Author", ""), "pages": len(pages),
    }  # fmt: skip


def main() -> None:
    cpu_seconds, memory_bytes, max_chars = map(int, sys.argv[1:4])
    limit(cpu_seconds, memory_bytes)
    try:
        found = read(sys.stdin.buffer.read(), max_chars)
    except pypdfium2.PdfiumError:
        found = {"code": "broken", "message": "is a PDF with a page that cannot be read"}
    except MemoryError:
        found = {"code": "too_large", "message": "is a PDF that needs too much memory"}
    sys.stdout.buffer.write(json.dumps(found).encode())


if __name__ == "__main__":
    main()
