"""The reading process: reads one document from standard input and writes its answer to standard output, in the format
of ``answer``: {"text", "media_type", "title", "author", "metadata"}, {"family"} of an Office file, or {"code",
"message"}.

It is a program, ``python -m connectors.extraction.process KIND LIMITS CONFINEMENT``, because a hostile file may crash
it, fill its memory, never end, or take it over. CONFINEMENT: ``required`` (without it nothing is read) or ``optional``.
With KIND ``run`` it confines itself and executes the program named by the remaining arguments.
"""

from __future__ import annotations

import encodings
import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module, util
from io import BytesIO
from pathlib import Path
from pkgutil import iter_modules
from typing import IO

from connectors.extraction.answer import encode, join_surrogates
from connectors.extraction.limits import Limits
from connectors.extraction.result import Extracted, Unreadable
from pipeline.runtime.confinement import Unconfined, confine, confine_program, end_with_parent, forbid, limit

Reader = Callable[[IO[bytes], Limits], "Extracted | str"]
"""Returns the text of a document, or the family of an Office file, which is the kind to read it as. Raises Unreadable,
and whatever a library raises for a file that it does not understand."""

_CODECS = (
    "ascii",
    "charmap",
    "cp1252",
    "cp437",
    "idna",
    "latin_1",
    "raw_unicode_escape",
    "unicode_escape",
    "utf_16",
    "utf_16_be",
    "utf_16_le",
    "utf_32",
    "utf_8",
    "utf_8_sig",
)
"""Codecs that the libraries for PDF and Office files use."""


def prepare(kind: str) -> tuple[Reader, list[Path]]:
    """Import a reader with everything that it needs. Return it with the folders that it has to read while it runs."""
    _import_codecs(_CODECS)
    match kind:
        case "pdf":
            from connectors.extraction.pdf import read_pdf

            return lambda file, limits: read_pdf(file.read(), limits), [_folder_of("pdfminer") / "cmap"]
        case "mail":
            from connectors.extraction.mail import read_mail

            import_module("pipeline.core.html")
            _import_codecs(module.name for module in iter_modules(encodings.__path__))  # a mail names any of them
            return lambda file, limits: read_mail(file.read(), limits), []
        case "word":
            from connectors.extraction.word import read_word

            return lambda file, limits: read_word(BytesIO(file.read()), limits), []
        case "slides":
            from connectors.extraction.slides import read_slides

            return lambda file, limits: read_slides(BytesIO(file.read()), limits), []
        case "sheets":
            sys.modules["numpy"] = None  # type: ignore[assignment]  # openpyxl would import it, and it starts threads
            from connectors.extraction.sheets import read_sheets

            return lambda file, limits: read_sheets(BytesIO(file.read()), limits), []
    if kind.startswith("."):
        from pipeline.runtime.plugins import load

        extractor: Reader = load("penstock.extractors", kind.removeprefix("."))
        return extractor, [_folder_of(extractor.__module__.partition(".")[0])]
    from connectors.extraction.zips import family_of

    return lambda file, limits: family_of(BytesIO(file.read()), limits), []


def _folder_of(package: str) -> Path:
    spec = util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _import_codecs(names: Iterable[str]) -> None:
    """Import codecs, which Python otherwise loads when they are first named."""
    for name in names:
        with suppress(ImportError):  # codecs of another operating system
            import_module(f"encodings.{name}")


def answer(read: Reader, file: IO[bytes], limits: Limits) -> dict[str, object]:
    """Read a document and return the answer, which is an error if it cannot be read."""
    try:
        result = read(file, limits)
    except Unreadable as error:
        return {"code": error.code, "message": str(error)}
    except MemoryError:
        return {"code": "too_much_memory", "message": "needs more memory to be read than a document may have"}
    except RecursionError:
        return {"code": "bomb", "message": "is nested too deeply"}
    except Exception as error:  # noqa: BLE001  # whatever a library does with a damaged file; its words may quote content
        return {"code": "broken", "message": f"is damaged: its reader failed ({type(error).__name__})"}
    if isinstance(result, str):
        return {"family": result}
    text = join_surrogates(result.text)
    if not text.strip():
        return {"code": "empty", "message": "holds no text"}
    if len(text.encode()) > limits.text_bytes:
        return {"code": "too_large", "message": f"holds more than {limits.text_bytes:,} bytes of text: split it"}
    return {**asdict(result), "text": text}


def _execute(program: list[str], *, is_required: bool) -> None:
    try:
        confine_program(Path(program[0]), Path.cwd())
    except Unconfined:
        if is_required:
            raise
    os.execv(program[0], program)  # noqa: S606


def main() -> None:
    kind, limits, is_required = sys.argv[1], Limits(**json.loads(sys.argv[2])), sys.argv[3] == "required"
    end_with_parent()
    limit(limits, may_start_programs=kind == "run")
    if kind == "run":
        _execute(sys.argv[4:], is_required=is_required)
    read, readable = prepare(kind)
    try:
        confine(readable)
        response = answer(read, sys.stdin.buffer, limits)
    except Unconfined as error:
        if is_required:
            response = {"code": "unconfined", "message": f"is not read: its reader cannot be confined ({error})"}
        else:
            forbid()
            response = answer(read, sys.stdin.buffer, limits)
    sys.stdout.buffer.write(encode(response))


if __name__ == "__main__":
    main()
