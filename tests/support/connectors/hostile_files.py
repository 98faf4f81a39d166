"""Files made to break their reader, and files that are merely broken: what each has to end as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.support.connectors.hostile_office import (
    encrypted_docx,
    far_corner_xlsx,
    flooding_eml,
    inflating_docx,
    inflating_xlsx,
    laughing_docx,
    many_parts_docx,
    misnamed_xlsx,
    nested_docx,
    nested_eml,
    overlapping_docx,
    picture_bomb_docx,
    plain_docx,
    reading_docx,
    repeating_xlsx,
    zip_of_zips,
)
from tests.support.connectors.hostile_pdfs import (
    damaged_pdf,
    endless_index_pdf,
    endless_index_stream_pdf,
    flooding_pdf,
    huge_picture_pdf,
    inflating_pdf,
    looping_pages_pdf,
    many_pages_pdf,
    multiplying_pdf,
    nested_instructions_pdf,
    nested_pdf,
    ruled_pdf,
    self_drawing_pdf,
)
from tests.support.connectors.pdf_files import encrypted_pdf, pdf_of


@dataclass(frozen=True)
class Hostile:
    name: str
    """As it is uploaded."""
    build: Callable[[], bytes]
    ends_as: frozenset[str]
    """The codes that say truly what it is; "text" where it is harmless and is read."""


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
    Hostile("misnamed.xlsx", misnamed_xlsx, frozenset({"bomb"})),
    Hostile("misnamed-utf7.xlsx", lambda: misnamed_xlsx("utf-7"), frozenset({"broken"})),
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
    Hostile("truncated.docx", lambda: plain_docx()[:-2000], frozenset({"truncated"})),
    Hostile("text.docx", lambda: b"only text", frozenset({"broken"})),
    Hostile("far-corner.xlsx", far_corner_xlsx, frozenset({"text"})),
    Hostile("repeating.xlsx", repeating_xlsx, frozenset({"text"})),
    Hostile("inflating.xlsx", inflating_xlsx, frozenset({"bomb"})),
    Hostile("nested.eml", nested_eml, frozenset({"bomb", "text"})),
    Hostile("flooding.eml", flooding_eml, frozenset({"text"})),
]
