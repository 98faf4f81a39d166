"""The text of a PDF, read by a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from connectors.extraction.unreadable import Unreadable
from topics.messages import MAX_CONTENT_BYTES

LIMIT_SECONDS = 60
MEMORY_BYTES = 2 * 1024**3
_PROGRAM = Path(__file__).with_name("pdf_process.py")


@dataclass(frozen=True, slots=True)
class PdfText:
    text: str
    title: str
    author: str
    pages: int


def is_pdf(data: bytes) -> bool:
    """Readers accept a header anywhere in the first kilobyte; text that merely mentions one is no PDF."""
    return data.startswith(b"%PDF-") or (b"%PDF-" in data[:1024] and b"\x00" in data)


def pdf_text(data: bytes) -> PdfText:
    """Raises Unreadable: broken, encrypted, needs_ocr, too_large, too_slow. Blocks: call it in a thread."""
    arguments = [LIMIT_SECONDS, MEMORY_BYTES, MAX_CONTENT_BYTES]
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(_PROGRAM), *map(str, arguments)],
            input=data, capture_output=True, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Unreadable("too_slow", f"is a PDF that took more than {LIMIT_SECONDS} s to read") from error
    if done.returncode != 0 or not done.stdout:
        raise Unreadable("broken", f"is a PDF that its reader could not bear (exit code {done.returncode})")
    found = json.loads(done.stdout)
    if "code" in found:
        raise Unreadable(found["code"], found["message"])
    text = found["text"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # pairs joined, halves replaced
    return PdfText(text, found["title"], found["author"], found["pages"])
