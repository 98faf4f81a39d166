"""Readers of files take work in proportion to a file, whatever is repeated in it, and however its parts refer to each
other."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from io import BytesIO

import docx
import openpyxl
import pptx
import pytest

from connectors.extraction.limits import Limits
from connectors.extraction.mail import read_mail
from connectors.extraction.sheets import read_sheets
from connectors.extraction.slides import read_slides
from connectors.extraction.word import read_word
from tests.unit.connectors.test_growth import MOST_GROWTH, work

pytestmark = pytest.mark.heavy

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006"


@cache
def empty(kind: str) -> Mapping[str, bytes]:
    """Return the parts of a file without content."""
    file = BytesIO()
    if kind == "word":
        docx.Document().save(file)
    elif kind == "sheets":
        openpyxl.Workbook().save(file)
    else:
        deck = pptx.Presentation()
        deck.slides.add_slide(deck.slide_layouts[6])
        deck.save(file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(kind: str, **parts: str) -> BytesIO:
    """Return a file with some parts replaced by their names."""
    file = BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in empty(kind).items():
            archive.writestr(name, parts.get(name.rpartition("/")[2].removesuffix(".xml"), content))
    return file


def word(body: str, styles: str = "") -> int:
    document = f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
    file = packed("word", document=document, styles=f'<w:styles xmlns:w="{WORD}">{styles}</w:styles>')
    return len(read_word(file, Limits()).text)


def sheets(rows: str) -> int:
    sheet = f'<worksheet xmlns="{SHEET}"><sheetData>{rows}</sheetData></worksheet>'
    return len(read_sheets(packed("sheets", sheet1=sheet), Limits()).text)


def slides(shapes: str) -> int:
    slide = empty("slides")["ppt/slides/slide1.xml"].decode()
    file = packed("slides", slide1=slide.replace("</p:spTree>", f"{shapes}</p:spTree>"))
    return len(read_slides(file, Limits()).text)


def mail(head: str, body: str = "text") -> int:
    return len(read_mail(f"Subject: s\n{head}\n\n{body}".encode(), Limits()).text)


RUN = "<w:r><w:t>a</w:t></w:r>"
PARAGRAPH = f"<w:p>{RUN}</w:p>"
STYLED = '<w:p><w:pPr><w:pStyle w:val="s0"/></w:pPr><w:r><w:rPr><w:rStyle w:val="s0"/></w:rPr><w:t>a</w:t></w:r></w:p>'
CELL = '<c t="inlineStr"><is><t>a</t></is></c>'
TEXT = "<a:txBody><a:bodyPr/><a:p><a:r><a:t>a</a:t></a:r></a:p></a:txBody>"
MIXED = "Content-Type: multipart/mixed; boundary=b"


def based_on_the_next(number: int) -> str:
    return "".join(
        f'<w:style w:type="paragraph" w:styleId="s{n}"><w:name w:val="s{n}"/><w:basedOn w:val="s{n + 1}"/></w:style>'
        for n in range(number)
    )


def drawn_table(rows: int, columns: int) -> str:
    row = f'<a:tr h="1">{f"<a:tc>{TEXT}</a:tc>" * columns}</a:tr>'
    return (
        '<p:graphicFrame><p:nvGraphicFramePr><p:cNvPr id="4" name="t"/><p:cNvGraphicFramePr/><p:nvPr/>'
        f'</p:nvGraphicFramePr><p:xfrm/><a:graphic><a:graphicData uri="{DRAWING}/table"><a:tbl><a:tblGrid/>'
        f"{row * rows}</a:tbl></a:graphicData></a:graphic></p:graphicFrame>"
    )


FILES: dict[str, Callable[[int], int]] = {
    "paragraphs": lambda n: word(PARAGRAPH * n),
    "runs": lambda n: word(f"<w:p>{RUN * n}</w:p>"),
    "styles based on each other": lambda n: word(STYLED * n, based_on_the_next(n)),
    "rows of a table": lambda n: word(f"<w:tbl>{f'<w:tr><w:tc>{PARAGRAPH}</w:tc></w:tr>' * n}</w:tbl>"),
    "cells of a table": lambda n: word(f"<w:tbl><w:tr>{f'<w:tc>{PARAGRAPH}</w:tc>' * n}</w:tr></w:tbl>"),
    "rows of a sheet": lambda n: sheets(f"<row>{CELL}</row>" * n),
    "cells of a sheet": lambda n: sheets(f"<row>{CELL * n}</row>"),
    "rows of a table on a slide": lambda n: slides(drawn_table(n, 1)),
    "cells of a table on a slide": lambda n: slides(drawn_table(1, n)),
    "parts of a mail": lambda n: mail(MIXED, "--b\nContent-Type: a/b\n\na\n" * n),
    "addresses of a mail": lambda n: mail("To: " + "a <a@b.example>, " * n),
    "encoded words of a mail": lambda n: mail("To: " + "=?utf-8?q?a?= " * n),
}


@pytest.mark.parametrize("name", FILES)
def test_work_grows_in_proportion_to_a_file(name: str) -> None:
    """A file of 26 kB with styles that are based on each other took its whole minute."""
    make = FILES[name]
    make(1)
    small, large = (work(lambda _, n=n: make(n), "") for n in (100, 200))  # type: ignore[misc]
    assert all(b <= MOST_GROWTH * a + 500 for a, b in zip(small, large, strict=True)), f"{small} → {large}"
