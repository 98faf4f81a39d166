"""Office and mail files → Markdown, from files that their own libraries wrote."""

from __future__ import annotations

import asyncio
import io
import zipfile
from datetime import date
from email.message import EmailMessage
from pathlib import Path
from random import Random

import docx
import openpyxl
import pytest
from pptx import Presentation
from pptx.oxml.shapes.groupshape import CT_GroupShape
from pptx.util import Inches

from connectors.extraction import sandbox
from connectors.extraction.mail import read_mail
from connectors.extraction.result import Unreadable
from connectors.extraction.settings import ExtractionSettings
from connectors.folder.content import read
from tests.support.connectors.extraction_kit import SMALL, Extract, saved
from tests.support.connectors.hostile_office import plain_docx, repacked, sheet_xml


@pytest.fixture
def extract(tmp_path: Path) -> Extract:
    return Extract(tmp_path)


async def test_docx_headings_lists_and_tables_become_markdown(extract: Extract) -> None:
    document = docx.Document()
    document.core_properties.author = "Ada"
    document.sections[0].header.paragraphs[0].text = "On every page"
    document.add_heading("Travel policy", 0)
    document.add_heading("Booking", 2)
    document.add_paragraph("Trains first.\n# then planes")
    document.add_paragraph("by day", style="List Bullet")
    document.add_paragraph("by night", style="List Bullet")
    document.add_paragraph("sign", style="List Number")
    table = document.add_table(2, 3)
    for n, text in enumerate(["City|Town", "Rate", "", "Oslo\nNorth", "120", ""]):
        table.cell(n // 3, n % 3).text = text
    paragraph = document.add_paragraph("Seen ")
    run = paragraph.add_run("HIDDEN")
    run.font.hidden = True
    document.add_comment(paragraph.runs[0], text="A COMMENT", author="B", initials="B")
    extracted = await extract("policy.docx", saved(document))
    assert extracted.text == (
        "# Travel policy\n\n## Booking\n\nTrains first.\n\\# then planes\n\n- by day\n- by night\n1. sign\n\n"
        "| City\\|Town | Rate |\n| --- | --- |\n| Oslo<br>North | 120 |\n\nSeen\n"
    )
    assert (extracted.title, extracted.author, extracted.media_type) == ("Travel policy", "Ada", "text/markdown")


async def test_docx_without_styles_of_its_own_is_read(extract: Extract) -> None:
    """The library opened a file of default styles, which the confinement refused: the document counted as damaged."""
    kept = ("[Content_Types].xml", "word/document.xml")
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    relationships = (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        f'<Relationship Id="a" Type="{office}" Target="word/document.xml"/></Relationships>'
    )
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(plain_docx())) as archive, zipfile.ZipFile(made, "w") as bare:
        for name in kept:
            bare.writestr(name, archive.read(name))
        bare.writestr("_rels/.rels", relationships)
    assert (await extract("a.docx", made.getvalue())).text == "Harmless words.\n"


async def test_docx_keeps_tracked_insertions_and_drops_tracked_deletions(extract: Extract) -> None:
    with zipfile.ZipFile(io.BytesIO(saved(docx.Document()))) as archive:
        xml = archive.read("word/document.xml")
    changed = (
        b'<w:p><w:del w:id="1"><w:r><w:delText>DELETED</w:delText></w:r></w:del>'
        b'<w:ins w:id="2"><w:r><w:t>inserted</w:t></w:r></w:ins><w:r><w:instrText>FIELD</w:instrText></w:r></w:p>'
        b"<w:sdt><w:sdtContent><w:p><w:r><w:t>in a control</w:t></w:r></w:p></w:sdtContent></w:sdt>"
    )
    at = xml.index(b"<w:body>") + len(b"<w:body>")
    data = repacked(saved(docx.Document()), {"word/document.xml": xml[:at] + changed + xml[at:]})
    assert (await extract("a.docx", data)).text == "inserted\n\nin a control\n"


async def test_pptx_slides_notes_and_tables_become_markdown(extract: Extract) -> None:
    deck = Presentation()
    first = deck.slides.add_slide(deck.slide_layouts[1])
    first.shapes.title.text = "Results"
    first.placeholders[1].text = "Up 3%\nCosts down"
    first.notes_slide.notes_text_frame.text = "Say thanks"
    off = first.shapes.add_textbox(Inches(1), Inches(1), Inches(1), Inches(1))
    off.text_frame.text = "HIDDEN"
    off._element._nvXxPr.cNvPr.set("hidden", "1")
    group = first.shapes.add_group_shape()
    group.shapes.add_textbox(Inches(1), Inches(1), Inches(1), Inches(1)).text_frame.text = "HIDDEN"
    group._element._nvXxPr.cNvPr.set("hidden", "true")
    second = deck.slides.add_slide(deck.slide_layouts[5])
    second.shapes.title.text = "Figures"
    table = second.shapes.add_table(2, 2, Inches(1), Inches(2), Inches(4), Inches(1)).table
    for n, text in enumerate(["a", "b", "1", "2|3"]):
        table.cell(n // 2, n % 2).text = text
    hidden = deck.slides.add_slide(deck.slide_layouts[5])
    hidden.shapes.title.text = "HIDDEN"
    hidden._element.set("show", "0")
    extracted = await extract("deck.pptx", saved(deck))
    assert extracted.text == (
        "## Results\n\n- Up 3%\n- Costs down\n\nNotes: Say thanks\n\n"
        "## Figures\n\n| a | b |\n| --- | --- |\n| 1 | 2\\|3 |\n"
    )
    assert (extracted.title, extracted.metadata) == ("Results", {"slides": 3, "hidden_slides": 1})


async def test_text_of_deeply_nested_groups_of_a_slide_is_read(extract: Extract) -> None:
    """Below fifty groups it was left out, and nothing said so."""
    deck = Presentation()
    slide = deck.slides.add_slide(deck.slide_layouts[6])
    words = slide.shapes.add_textbox(0, 0, Inches(1), Inches(1))
    words.text_frame.text = "deep words"
    inner = words._element
    for n in range(100):
        group = CT_GroupShape.new_grpSp(n + 100, f"Group {n}")
        group.append(inner)
        inner = group
    slide.shapes._spTree.append(inner)
    assert (await extract("a.pptx", saved(deck))).text == "## Slide 1\n\ndeep words\n"


async def test_xlsx_visible_sheets_become_markdown_tables(extract: Extract) -> None:
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Rates"
    for row in (
        ["City", "Rate", None, "When"],
        [],
        ["Oslo", 0.1 + 0.2, None, date(2026, 1, 2)],
        ["Rome", 5, None, True],
    ):
        sheet.append(row)
    book.create_sheet("Secret").append(["HIDDEN"])
    book["Secret"].sheet_state = "hidden"
    extracted = await extract("rates.xlsx", saved(book))
    assert extracted.text == (
        "## Rates\n\n| City | Rate | When |\n| --- | --- | --- |\n| Oslo | 0.3 | 2026-01-02 |\n| Rome | 5 | TRUE |\n"
    )
    assert extracted.metadata == {"sheets": 2, "hidden_sheets": 1}


async def test_a_formula_is_shown_by_the_value_saved_with_it(extract: Extract) -> None:
    sheet = sheet_xml(b'<row r="1"><c r="A1"><f>20+22</f><v>42</v></c></row>')
    data = repacked(saved(openpyxl.Workbook()), {"xl/worksheets/sheet1.xml": sheet})
    assert "| 42 |" in (await extract("a.xlsx", data)).text


async def test_a_workbook_with_too_many_cells_is_truncated_and_says_so(extract: Extract) -> None:
    book = openpyxl.Workbook()
    for n in range(300):
        book.active.append([n, f"row {n}"])
    extracted = await extract("a.xlsx", saved(book), SMALL.model_copy(update={"cells": 200}))
    assert "row 99" in extracted.text
    assert "row 100" not in extracted.text
    assert extracted.text.endswith("(The rest of this workbook is left out: it is longer than what is indexed.)\n")
    assert extracted.metadata == {"sheets": 1, "truncated": True}


async def test_a_cell_of_megabytes_is_shortened_and_what_follows_it_is_read(extract: Extract) -> None:
    """It alone was more than what is indexed of a workbook, of which nothing was left."""
    words = Random(3).randbytes(2**21).hex()
    row = f'<row><c t="inlineStr"><is><t>{words}</t></is></c><c><v>7</v></c></row>'.encode()
    data = repacked(saved(openpyxl.Workbook()), {"xl/worksheets/sheet1.xml": sheet_xml(row)})
    extracted = await extract("a.xlsx", data)
    assert extracted.text == f"## Sheet\n\n| {words[: 2**18]} | 7 |\n| --- | --- |\n"
    assert extracted.metadata == {"sheets": 1, "truncated": True}


async def test_eml_headers_body_and_attachment_names_become_markdown(extract: Extract) -> None:
    mail = EmailMessage()
    mail["Subject"] = "Trip to Łódź"
    mail["From"], mail["To"] = "Ada <ada@example.org>", "bob@example.org"
    mail["Date"] = "Mon, 02 Nov 2026 10:00:00 +0100"
    mail.set_content("Hello Bob")
    mail.add_alternative("<p>NOT THIS</p>", subtype="html")
    mail.add_attachment(b"%PDF-", maintype="application", subtype="pdf", filename="plan.pdf")
    extracted = await extract("trip.eml", bytes(mail))
    assert extracted.text == (
        "# Trip to Łódź\n\nFrom: Ada <ada@example.org>  \nTo: bob@example.org  \n"
        "Date: Mon, 02 Nov 2026 10:00:00 +0100\n\nHello Bob\n\nAttachments:\n- plan.pdf (application/pdf)\n"
    )
    assert (extracted.title, extracted.author) == ("Trip to Łódź", "Ada <ada@example.org>")
    assert extracted.metadata == {"attachments": 1, "sent_at": "2026-11-02T10:00:00+01:00"}
    html = EmailMessage()
    html["Subject"] = "s"
    html.set_content("<h2>Plan</h2><p style='display:none'>HIDDEN</p><p>Go</p>", subtype="html")
    assert (await extract("mail", bytes(html), media_type="message/rfc822")).text == "# s\n\n## Plan\n\nGo\n"


def test_a_mail_whose_date_is_damaged_is_read() -> None:
    """One of very many digits made the whole mail count as damaged."""
    for date_ in (b"Mon, 99999999999999999999 Jan 2024 00:00:00 +0000", b"Mon, 01 Jan 2024 99:99:99 +9999", b"soon"):
        result = read_mail(b"Subject: s\nDate: " + date_ + b"\n\nbody\n", ExtractionSettings().limits())
        assert result.text.startswith("# s\n")
        assert result.text.endswith("body\n")
        assert "sent_at" not in result.metadata


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Type: x/y; a*",
        b"Content-Disposition: ; a*",
        b"Content-Type: text/plain; charset*=idna''utf-8",
        b"Content-Type: text/plain; charset*=\"u\x00\"''utf-8",
        b"Content-Type: multipart/mixed; boundary=b; charset=idna",
    ],
)
def test_a_mail_whose_parts_cannot_be_recognised_is_broken(headers: bytes) -> None:
    """The library's errors counted as a crash of the program that reads mails."""
    with pytest.raises(Unreadable) as raised:
        read_mail(b"Subject: s\n" + headers + b"\n\n\xc3\xa4\n", ExtractionSettings().limits())
    assert raised.value.code == "broken"


async def test_text_is_read_without_a_process_and_by_its_media_type_if_the_name_has_no_suffix(
    extract: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "PROGRAM", ("/nonexistent",))
    assert (await extract("notes.md", b"# Title\n\ntext")).title == "Title"
    assert (await extract("page", b"<p>text", media_type="text/html; charset=utf-8")).media_type == "text/html"


async def test_the_folder_connector_reads_office_files(tmp_path: Path) -> None:
    document = docx.Document()
    document.add_heading("Minutes", 1)
    path = tmp_path.resolve() / "minutes.docx"
    path.write_bytes(saved(document))
    extracted = (await asyncio.to_thread(read, str(path), path.stat())).extracted
    assert extracted is not None
    assert (extracted.text, extracted.title) == ("# Minutes\n", "Minutes")


async def test_an_office_file_with_a_doctype_in_an_embedded_svg_or_html_is_read(extract: Extract) -> None:
    drawing = (
        b'<?xml version="1.0" standalone="no"?>\n<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "svg11.dtd"><svg/>'
    )
    parts = {"word/media/a.svg": drawing, "word/a.htm": b"<!DOCTYPE html><p>x", "word/a.bin": b"\x00\x01<!ENTITY"}
    assert (await extract("a.docx", repacked(plain_docx(), parts))).text == "Harmless words.\n"
