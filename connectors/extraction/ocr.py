"""``ocrmypdf``, if somebody has installed it: a program of its own, never a part of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

from connectors.extraction.settings import ExtractionSettings

PROGRAM = "ocrmypdf"
_REASONS = {
    1: "it was called wrongly",
    2: "the PDF is damaged",
    3: "a program is missing that it needs (tesseract, say)",
    4: "its result was not a valid PDF",
    5: "it may not write its files",
    7: "tesseract failed",
    8: "the PDF is encrypted",
    9: "its tesseract configuration is wrong",
    15: "it does not say why",
}
"""Its exit codes (ocrmypdf.readthedocs.io, "Advanced features", "Return code policy")."""


def program() -> str | None:
    return shutil.which(PROGRAM)


def command(program: str, given: Path, made: Path, settings: ExtractionSettings) -> list[str]:
    """Pages that have text keep it; one page at a time, for whose memory the limits are."""
    return [
        program,
        "--skip-text",
        "--quiet",
        "--output-type",
        "pdf",
        "--optimize",
        "0",
        "--jobs",
        "1",
        "--language",
        settings.ocr_languages,
        str(given),
        str(made),
    ]


def advice(settings: ExtractionSettings) -> str:
    """For the one whose document it is, and the one who runs this."""
    if settings.ocr:
        return f"OCR is switched on but {PROGRAM} is not installed: install it, or recognise the text before uploading"
    return f"recognise its text before uploading, or install {PROGRAM} and set PENSTOCK_EXTRACTION_OCR=true"


def reason(code: int) -> str:
    return _REASONS.get(code, f"it ended with {code}")
