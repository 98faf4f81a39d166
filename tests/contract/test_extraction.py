"""Real PDF, Office and mail files → Markdown, and what becomes of files that are made to break their reader."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import date
from email.message import EmailMessage
from pathlib import Path

import docx
import openpyxl
import psutil
import pytest
from pptx import Presentation
from pptx.util import Inches

from connectors.extraction import Extracted, ExtractionSettings, Unreadable, extract_file, sandbox
from connectors.folder.read import read
from tests.hostile_files import HOSTILE, MEGABYTE, Hostile, fetching_docx, repacked
from tests.pdf_files import Line, Sheet, typeset

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "nobody", "in", "a", "meadow"]
SMALL = ExtractionSettings(memory_bytes=512 * MEGABYTE, cpu_seconds=20, wall_seconds=60, at_once=2)


def prose(tag: str, lines: int) -> list[str]:
    return [f"{tag}{n} " + " ".join(WORDS[(n + k) % len(WORDS)] for k in range(6)) for n in range(lines)]


class Extract:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def __call__(
        self, name: str, data: bytes, settings: ExtractionSettings = SMALL, media_type: str | None = None
    ) -> Extracted:
        path = self._folder / "stored"
        path.write_bytes(data)
        return await extract_file(path, name, media_type, settings=settings)

    async def refused(self, name: str, data: bytes, settings: ExtractionSettings = SMALL) -> Unreadable:
        with pytest.raises(Unreadable) as caught:
            await self(name, data, settings)
        assert "\n" not in str(caught.value)
        return caught.value


@pytest.fixture
def extract(tmp_path: Path) -> Extract:
    return Extract(tmp_path)


def saved(made: object) -> bytes:
    file = io.BytesIO()
    made.save(file)  # type: ignore[attr-defined]
    return file.getvalue()


# PDF


async def test_columns_are_read_one_after_the_other_under_the_title_that_spans_them(extract: Extract) -> None:
    sheet = Sheet([Line(72, 740, "A wide title over two columns of text", 20), Line(72, 715, "by Somebody")])
    for n, (left, right) in enumerate(zip(prose("L", 12), prose("R", 12), strict=True)):
        sheet.lines += [Line(72, 680 - 12 * n, left), Line(330, 680 - 12 * n, right)]  # as many programs write them
    found = await extract("a.pdf", typeset([sheet]))
    assert found.media_type == "text/markdown"
    assert found.title == "A wide title over two columns of text"
    assert found.text.startswith("# A wide title over two columns of text\n\nby Somebody\n\nL0 ")
    assert [word for word in found.text.split() if word[0] in "LR"] == [
        f"{side}{n}" for side in "LR" for n in range(12)
    ]


async def test_headings_by_size_and_weight_tables_and_divided_words(extract: Extract) -> None:
    sheet = Sheet([Line(72, 700, "Report", 20), Line(72, 660, "First part", 14)])
    sheet.lines += [Line(72, 640 - 12 * n, text) for n, text in enumerate(prose("a", 4))]
    sheet.lines += [
        Line(72, 560, "Bold words", bold=True),
        Line(72, 540, "This is an exam-"),
        Line(72, 528, "ple of it."),
    ]
    sheet.grid(72, 480, [100, 100, 150], [["City", "Rate", "Note|s"], ["Oslo", "120", "cold"], ["Rome", "90", "warm"]])
    sheet.lines.append(Line(72, 380, "# no heading"))
    found = await extract("a.pdf", typeset([sheet], title="Microsoft Word - draft.doc"))
    blocks = found.text.split("\n\n")
    assert blocks[:2] == ["# Report", "## First part"]
    assert blocks[2].startswith("a0 the quick brown fox jumps over a1 quick")
    assert blocks[3:] == [
        "### Bold words", "This is an example of it.",
        "| City | Rate | Note\\|s |\n| --- | --- | --- |\n| Oslo | 120 | cold |\n| Rome | 90 | warm |",
        "\\# no heading",
    ]  # fmt: skip
    assert (found.title, found.metadata) == ("Report", {"pages": 1})


async def test_what_stands_on_every_page_is_dropped(extract: Extract) -> None:
    def sheet(n: int) -> Sheet:
        lines = [Line(72, 770, "ACME - Confidential"), Line(300, 30, f"Page {n + 1} of 6")]
        return Sheet(lines + [Line(72, 690 - 12 * k, text) for k, text in enumerate(prose(f"p{n}x", 4))])

    found = await extract("a.pdf", typeset([sheet(n) for n in range(6)]))
    assert "ACME" not in found.text
    assert "Page" not in found.text
    assert all(f"p{n}x{k} " in found.text for n in range(6) for k in range(4))
    assert found.media_type == "text/plain"  # there was no structure to keep


async def test_a_page_laid_out_sideways_reads_as_it_is_shown(extract: Extract) -> None:
    class Sideways(Sheet):
        def content(self) -> bytes:
            return b"q 0 1 -1 0 612 0 cm " + super().content() + b" Q"

    sheet = Sideways([Line(72, 560, "Landscape", 20)], rotate=90)
    sheet.lines += [Line(72, 520 - 12 * n, text) for n, text in enumerate(prose("a", 5))]
    sheet.grid(72, 420, [100, 100], [["City", "Rate"], ["Oslo", "120"]])
    found = await extract("a.pdf", typeset([sheet]))
    assert found.text.startswith("# Landscape\n\na0 the quick")
    assert found.text.endswith("| City | Rate |\n| --- | --- |\n| Oslo | 120 |")


async def test_a_scan_with_a_stamp_on_each_page_needs_ocr_and_says_what_to_do(extract: Extract) -> None:
    scan = typeset([Sheet([Line(500, 20, f"{n}")], picture=True) for n in range(4)])
    error = await extract.refused("scan.pdf", scan)
    assert error.code == "needs_ocr"
    assert "PENSTOCK_EXTRACTION_OCR" in str(error)
    mixed = [Sheet(picture=True), *[Sheet([Line(72, 700, text)]) for text in prose("a", 3)]]
    assert (await extract("a.pdf", typeset(mixed))).metadata == {"pages": 4, "pages_without_text": 1}


def program(folder: Path, script: str) -> str:
    """A PATH on which ``ocrmypdf`` is this shell script; ``$given`` and ``$made`` are its files."""
    path = folder / "bin" / "ocrmypdf"
    path.parent.mkdir()
    path.write_text('#!/bin/sh\nfor last; do given="$made"; made="$last"; done\n' + script)
    path.chmod(0o755)
    return f"{path.parent}{os.pathsep}{os.environ['PATH']}"


SCAN = typeset([Sheet(picture=True)])
OCR = SMALL.model_copy(update={"ocr": True})


async def test_ocrmypdf_is_used_when_it_is_installed_and_switched_on(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recognised = tmp_path / "recognised.pdf"
    recognised.write_bytes(typeset([Sheet([Line(72, 700, "What the scan says")], picture=True)]))
    noted = f'echo "$@" > {tmp_path}/arguments; ulimit -v > {tmp_path}/limit'
    script = f'grep -q /I1 "$given" && cp {recognised} "$made"; {noted}'
    monkeypatch.setenv("PATH", program(tmp_path, script))
    assert (await extract.refused("scan.pdf", SCAN)).code == "needs_ocr"
    assert not (tmp_path / "arguments").exists()
    found = await extract("scan.pdf", SCAN, OCR)
    assert (found.text, found.metadata) == ("What the scan says", {"pages": 1, "ocr": True})
    assert "--skip-text" in (tmp_path / "arguments").read_text()
    assert int((tmp_path / "limit").read_text()) == OCR.ocr_memory_bytes // 1024


async def test_ocr_that_is_missing_fails_or_never_ends_leaves_a_clear_word(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in str(await extract.refused("scan.pdf", SCAN, OCR))
    monkeypatch.undo()
    monkeypatch.setenv(
        "PATH", program(tmp_path, f"test -e {tmp_path}/endless || exit 3\nsleep 1000 & echo $! > {tmp_path}/pid\nwait")
    )
    assert "missing" in str(await extract.refused("scan.pdf", SCAN, OCR))
    (tmp_path / "endless").touch()
    error = await extract.refused("scan.pdf", SCAN, OCR.model_copy(update={"ocr_wall_seconds": 5}))
    assert "more than 5 s" in str(error)
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


# Office and mail


async def test_docx(extract: Extract) -> None:
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
    found = await extract("policy.docx", saved(document))
    assert found.text == (
        "# Travel policy\n\n## Booking\n\nTrains first.\n\\# then planes\n\n- by day\n- by night\n1. sign\n\n"
        "| City\\|Town | Rate |\n| --- | --- |\n| Oslo<br>North | 120 |\n\nSeen\n"
    )
    assert (found.title, found.author, found.media_type) == ("Travel policy", "Ada", "text/markdown")


async def test_docx_shows_what_tracked_changes_insert_and_not_what_they_delete(extract: Extract) -> None:
    with zipfile.ZipFile(io.BytesIO(saved(docx.Document()))) as archive:
        xml = archive.read("word/document.xml")
    changed = (
        b'<w:p><w:del w:id="1"><w:r><w:delText>DELETED</w:delText></w:r></w:del>'
        b'<w:ins w:id="2"><w:r><w:t>inserted</w:t></w:r></w:ins><w:r><w:instrText>FIELD</w:instrText></w:r></w:p>'
        b"<w:sdt><w:sdtContent><w:p><w:r><w:t>in a control</w:t></w:r></w:p></w:sdtContent></w:sdt>"
    )  # fmt: skip
    at = xml.index(b"<w:body>") + len(b"<w:body>")
    data = repacked(saved(docx.Document()), {"word/document.xml": xml[:at] + changed + xml[at:]})
    assert (await extract("a.docx", data)).text == "inserted\n\nin a control\n"


async def test_pptx(extract: Extract) -> None:
    deck = Presentation()
    first = deck.slides.add_slide(deck.slide_layouts[1])
    first.shapes.title.text = "Results"
    first.placeholders[1].text = "Up 3%\nCosts down"
    first.notes_slide.notes_text_frame.text = "Say thanks"
    second = deck.slides.add_slide(deck.slide_layouts[5])
    second.shapes.title.text = "Figures"
    table = second.shapes.add_table(2, 2, Inches(1), Inches(2), Inches(4), Inches(1)).table
    for n, text in enumerate(["a", "b", "1", "2|3"]):
        table.cell(n // 2, n % 2).text = text
    hidden = deck.slides.add_slide(deck.slide_layouts[5])
    hidden.shapes.title.text = "HIDDEN"
    hidden._element.set("show", "0")
    found = await extract("deck.pptx", saved(deck))
    assert found.text == (
        "## Results\n\n- Up 3%\n- Costs down\n\nNotes: Say thanks\n\n"
        "## Figures\n\n| a | b |\n| --- | --- |\n| 1 | 2\\|3 |\n"
    )
    assert (found.title, found.metadata) == ("Results", {"slides": 3, "hidden_slides": 1})


async def test_xlsx(extract: Extract) -> None:
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
    found = await extract("rates.xlsx", saved(book))
    assert found.text == (
        "## Rates\n\n| City | Rate | When |\n| --- | --- | --- |\n| Oslo | 0.3 | 2026-01-02 |\n| Rome | 5 | TRUE |\n"
    )
    assert found.metadata == {"sheets": 2, "hidden_sheets": 1}


async def test_a_formula_is_shown_by_the_value_saved_with_it(extract: Extract) -> None:
    sheet = (
        b'<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"><sheetData>'
        b'<row r="1"><c r="A1"><f>20+22</f><v>42</v></c></row></sheetData></worksheet>'
    )
    data = repacked(saved(openpyxl.Workbook()), {"xl/worksheets/sheet1.xml": sheet})
    assert "| 42 |" in (await extract("a.xlsx", data)).text


async def test_a_workbook_beyond_the_cap_is_cut_and_says_so(extract: Extract) -> None:
    book = openpyxl.Workbook()
    for n in range(300):
        book.active.append([n, f"row {n}"])
    found = await extract("a.xlsx", saved(book), SMALL.model_copy(update={"cells": 200}))
    assert "row 99" in found.text
    assert "row 100" not in found.text
    assert found.text.endswith("(The rest of this workbook is left out: it is longer than what is indexed.)\n")
    assert found.metadata == {"sheets": 1, "truncated": True}


async def test_eml(extract: Extract) -> None:
    mail = EmailMessage()
    mail["Subject"] = "Trip to Łódź"
    mail["From"], mail["To"] = "Ada <ada@example.org>", "bob@example.org"
    mail["Date"] = "Mon, 02 Nov 2026 10:00:00 +0100"
    mail.set_content("Hello Bob")
    mail.add_alternative("<p>NOT THIS</p>", subtype="html")
    mail.add_attachment(b"%PDF-", maintype="application", subtype="pdf", filename="plan.pdf")
    found = await extract("trip.eml", bytes(mail))
    assert found.text == (
        "# Trip to Łódź\n\nFrom: Ada <ada@example.org>  \nTo: bob@example.org  \n"
        "Date: Mon, 02 Nov 2026 10:00:00 +0100\n\nHello Bob\n\nAttachments:\n- plan.pdf (application/pdf)\n"
    )
    assert (found.title, found.author) == ("Trip to Łódź", "Ada <ada@example.org>")
    assert found.metadata == {"attachments": 1, "sent_at": "2026-11-02T10:00:00+01:00"}
    html = EmailMessage()
    html["Subject"] = "s"
    html.set_content("<h2>Plan</h2><p style='display:none'>HIDDEN</p><p>Go</p>", subtype="html")
    assert (await extract("mail", bytes(html), media_type="message/rfc822")).text == "# s\n\n## Plan\n\nGo\n"


async def test_text_needs_no_process_and_its_declared_type_counts_where_the_name_says_nothing(
    extract: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "PROGRAM", ("/nonexistent",))
    assert (await extract("notes.md", b"# Title\n\ntext")).title == "Title"
    assert (await extract("page", b"<p>text", media_type="text/html; charset=utf-8")).media_type == "text/html"


async def test_a_folder_takes_office_files_too(tmp_path: Path) -> None:
    document = docx.Document()
    document.add_heading("Minutes", 1)
    path = tmp_path.resolve() / "minutes.docx"
    path.write_bytes(saved(document))
    found = (await asyncio.to_thread(read, str(path), path.stat())).extracted
    assert found is not None
    assert (found.text, found.title) == ("# Minutes\n", "Minutes")


# What is made to break its reader


@asynccontextmanager
async def watched() -> AsyncIterator[Callable[[], tuple[int, int]]]:
    """Yields what tells how much this process has grown, and how large its children were, at most; in bytes."""
    me = psutil.Process()
    before, grown, largest = me.memory_info().rss, 0, 0

    async def look() -> None:
        nonlocal grown, largest
        while True:
            grown = max(grown, me.memory_info().rss - before)
            for child in await asyncio.to_thread(me.children, recursive=True):
                try:
                    if "connectors.extraction.process" in child.cmdline():
                        largest = max(largest, child.memory_info().rss)
                except psutil.Error:
                    continue
            await asyncio.sleep(0.02)

    looking = asyncio.create_task(look())
    try:
        yield lambda: (grown, largest)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def outcome(path: Path, name: str) -> Extracted | Unreadable:
    try:
        return await extract_file(path, name, settings=SMALL)
    except Unreadable as error:
        return error


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
async def test_a_hostile_file_ends_as_what_it_is_and_costs_no_more_than_its_limits(
    hostile: Hostile, extract: Extract, tmp_path: Path
) -> None:
    (tmp_path / "given").write_bytes(hostile.build())
    async with watched() as cost:
        ended = await outcome(tmp_path / "given", hostile.name)
        grown, largest = cost()
    assert (ended.code if isinstance(ended, Unreadable) else "text") in hostile.ends_as, ended
    assert len(str(ended)) < 300 if isinstance(ended, Unreadable) else len(ended.text.encode()) <= 4 * MEGABYTE
    assert grown < 128 * MEGABYTE
    assert largest <= SMALL.memory_bytes
    assert (await extract("after.pdf", typeset([Sheet([Line(72, 700, "Still here")])]))).text == "Still here"


async def test_nothing_that_a_document_names_is_fetched(extract: Extract) -> None:
    asked = []
    server = await asyncio.start_server(lambda reader, writer: (asked.append(1), writer.close()), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert (await extract("a.docx", fetching_docx(f"http://127.0.0.1:{port}"))).text == "Harmless words.\n"
    assert asked == []


@pytest.mark.parametrize(
    "attempt",
    ["import socket; socket.create_connection(('127.0.0.1', {port}))", "import os; os.system('true')",
     "import os; os.fork()", "import subprocess; subprocess.run(['true'])"],
)  # fmt: skip
def test_a_reading_process_neither_connects_nor_starts_programs(attempt: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        attempt = attempt.format(port=listening.getsockname()[1])
        free = subprocess.run([sys.executable, "-c", attempt], check=False, capture_output=True)
        assert free.returncode == 0, "or the test proves nothing"
        confined = f"from connectors.extraction import confine, limits; confine.confine(limits.Limits()); {attempt}"
        done = subprocess.run([sys.executable, "-c", confined], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "PermissionError" in done.stderr


async def test_at_most_so_many_are_read_at_once_and_who_gives_up_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"marks {tmp_path.name}"
    monkeypatch.setattr(sandbox, "PROGRAM", (sys.executable, "-c", f"import time; time.sleep(1000)  # {mark}"))
    (tmp_path / "a.pdf").write_bytes(typeset([Sheet()]))

    def running() -> int:
        found = 0
        for child in psutil.Process().children():
            try:
                found += child.status() != psutil.STATUS_ZOMBIE and mark in " ".join(child.cmdline())
            except psutil.Error:
                continue
        return found

    settings = SMALL.model_copy(update={"at_once": 3})
    tasks = [asyncio.create_task(extract_file(tmp_path / "a.pdf", "a.pdf", settings=settings)) for _ in range(8)]
    await until(lambda: running() == 3)
    await asyncio.sleep(0.3)
    assert running() == 3
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await until(lambda: running() == 0)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "answer", ["", "[]", "nonsense", '{"code": "mine", "message": "x"}', '{"text": 1, "media_type": "text/plain"}',
               '{"text": "x", "media_type": "text/html", "title": null, "author": null, "metadata": {}}',
               '{"text": "x", "media_type": "text/plain", "title": null, "author": null, "metadata": {"a": {}}}']
)  # fmt: skip
async def test_the_answer_of_a_process_that_a_document_took_over_is_not_believed(
    extract: Extract, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    program = f"import pathlib; pathlib.Path('answer.json').write_text({answer!r})"
    monkeypatch.setattr(sandbox, "PROGRAM", (sys.executable, "-c", program))
    assert (await extract.refused("a.pdf", typeset([Sheet()]))).code == "crashed"
