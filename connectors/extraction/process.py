"""Reads one document from standard input and writes what it holds into ``answer.json`` in the current folder:
{"text", "media_type", "title", "author", "metadata"}, or {"code", "message"}.

A program of its own, ``python -m connectors.extraction.process KIND LIMITS``: a hostile file may crash it, fill its
memory or never end. With KIND ``run`` it confines itself and becomes the program named after LIMITS.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import IO

from connectors.extraction.confine import confine
from connectors.extraction.extracted import Extracted
from connectors.extraction.limits import Limits
from connectors.extraction.unreadable import Unreadable

ANSWER = "answer.json"


def read(kind: str, file: IO[bytes], limits: Limits) -> Extracted:
    """Raises Unreadable, and whatever a library raises for a file that it does not understand."""
    match kind:
        case "pdf":
            from connectors.extraction.pdf import read_pdf

            return read_pdf(file.read(), limits)
        case "mail":
            from connectors.extraction.mail import read_mail

            return read_mail(file.read(), limits)
    from connectors.extraction.zips import checked

    packed = BytesIO(file.read())
    family = checked(packed, limits)
    packed.seek(0)
    match family:
        case "word":
            from connectors.extraction.word import read_word

            return read_word(packed, limits)
        case "slides":
            from connectors.extraction.slides import read_slides

            return read_slides(packed, limits)
        case "sheets":
            from connectors.extraction.sheets import read_sheets

            return read_sheets(packed, limits)


def answer(kind: str, file: IO[bytes], limits: Limits) -> dict[str, object]:
    try:
        found = read(kind, file, limits)
    except Unreadable as error:
        return {"code": error.code, "message": str(error)}
    except MemoryError:
        return {"code": "too_much_memory", "message": "needs more memory to be read than a document may have"}
    except RecursionError:
        return {"code": "bomb", "message": "is nested more deeply than any document made to be read"}
    except Exception as error:  # noqa: BLE001  # whatever a library does with a damaged file; its words may quote content
        return {"code": "broken", "message": f"is damaged: its reader gave up ({type(error).__name__})"}
    if not found.text.strip():
        return {"code": "empty", "message": "holds no text"}
    if len(found.text.encode("utf-8", "replace")) > limits.text_bytes:
        return {"code": "too_large", "message": f"holds more than {limits.text_bytes:,} bytes of text: split it"}
    return asdict(found)


def main() -> None:
    kind, limits = sys.argv[1], Limits(**json.loads(sys.argv[2]))
    confine(limits, may_start_programs=kind == "run")
    if kind == "run":
        os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606
    Path(ANSWER).write_text(json.dumps(answer(kind, sys.stdin.buffer, limits)))


if __name__ == "__main__":
    main()
