"""PDFs → Markdown: columns, headings, tables, what is dropped, and OCR."""

from __future__ import annotations

import asyncio
import os
import tempfile
import tracemalloc
import venv
from pathlib import Path

import psutil
import pytest

from connectors.extraction import sandbox
from tests.support.connectors.extraction_kit import SMALL, Extract, prose
from tests.support.connectors.pdf_files import Line, Sheet, typeset
from tests.support.waiting import until


@pytest.fixture
def extract(tmp_path: Path) -> Extract:
    return Extract(tmp_path)


async def test_columns_are_read_one_after_the_other_below_a_title_spanning_them(extract: Extract) -> None:
    sheet = Sheet([Line(72, 740, "A wide title over two columns of text", 20), Line(72, 715, "by Somebody")])
    for n, (left, right) in enumerate(zip(prose("L", 12), prose("R", 12), strict=True)):
        sheet.lines += [Line(72, 680 - 12 * n, left), Line(330, 680 - 12 * n, right)]  # as many programs write them
    extracted = await extract("a.pdf", typeset([sheet]))
    assert extracted.media_type == "text/markdown"
    assert extracted.title == "A wide title over two columns of text"
    assert extracted.text.startswith("# A wide title over two columns of text\n\nby Somebody\n\nL0 ")
    assert [word for word in extracted.text.split() if word[0] in "LR"] == [
        f"{side}{n}" for side in "LR" for n in range(12)
    ]


async def test_pdf_headings_tables_and_hyphenated_words_become_markdown(extract: Extract) -> None:
    sheet = Sheet([Line(72, 700, "Report", 20), Line(72, 660, "First part", 14)])
    sheet.lines += [Line(72, 640 - 12 * n, text) for n, text in enumerate(prose("a", 4))]
    sheet.lines += [
        Line(72, 560, "Bold words", bold=True),
        Line(72, 540, "This is an exam-"),
        Line(72, 528, "ple of it."),
    ]
    sheet.grid(72, 480, [100, 100, 150], [["City", "Rate", "Note|s"], ["Oslo", "120", "cold"], ["Rome", "90", "warm"]])
    sheet.lines.append(Line(72, 380, "# no heading"))
    extracted = await extract("a.pdf", typeset([sheet], title="Microsoft Word - draft.doc"))
    blocks = extracted.text.split("\n\n")
    assert blocks[:2] == ["# Report", "## First part"]
    assert blocks[2].startswith("a0 the quick brown fox jumps over a1 quick")
    assert blocks[3:] == [
        "### Bold words",
        "This is an example of it.",
        "| City | Rate | Note\\|s |\n| --- | --- | --- |\n| Oslo | 120 | cold |\n| Rome | 90 | warm |",
        "\\# no heading",
    ]
    assert (extracted.title, extracted.metadata) == ("Report", {"pages": 1})


async def test_headers_and_footers_repeated_on_every_page_are_dropped(extract: Extract) -> None:
    def sheet(n: int) -> Sheet:
        lines = [Line(72, 770, "ACME - Confidential"), Line(300, 30, f"Page {n + 1} of 6")]
        return Sheet(lines + [Line(72, 690 - 12 * k, text) for k, text in enumerate(prose(f"p{n}x", 4))])

    extracted = await extract("a.pdf", typeset([sheet(n) for n in range(6)]))
    assert "ACME" not in extracted.text
    assert "Page" not in extracted.text
    assert all(f"p{n}x{k} " in extracted.text for n in range(6) for k in range(4))
    assert extracted.media_type == "text/plain"  # there was no structure to keep


async def test_pages_of_a_single_line_that_is_alike_on_all_of_them_are_read(extract: Extract) -> None:
    """Vouchers, labels and tickets: their line was taken for a header, and nothing was left."""
    extracted = await extract("vouchers.pdf", typeset([Sheet([Line(72, 750, f"Voucher {n} of 9")]) for n in range(9)]))
    assert [f"Voucher {n} of 9" in extracted.text for n in range(9)] == [True] * 9


async def test_scanned_pages_with_a_number_stamped_on_each_need_ocr(extract: Extract) -> None:
    """The numbers alone were their text."""
    sheets = [Sheet([Line(72, 20, f"CONFIDENTIAL - ABC-00012{n}")], picture=True) for n in range(9)]
    assert (await extract.refused("copies.pdf", typeset(sheets))).code == "needs_ocr"


async def test_a_rotated_page_is_read_in_its_displayed_orientation(extract: Extract) -> None:
    class Sideways(Sheet):
        def content(self) -> bytes:
            return b"q 0 1 -1 0 612 0 cm " + super().content() + b" Q"

    sheet = Sideways([Line(72, 560, "Landscape", 20)], rotate=90)
    sheet.lines += [Line(72, 520 - 12 * n, text) for n, text in enumerate(prose("a", 5))]
    sheet.grid(72, 420, [100, 100], [["City", "Rate"], ["Oslo", "120"]])
    extracted = await extract("a.pdf", typeset([sheet]))
    assert extracted.text.startswith("# Landscape\n\na0 the quick")
    assert extracted.text.endswith("| City | Rate |\n| --- | --- |\n| Oslo | 120 |")


async def test_a_scan_with_only_stamps_as_text_needs_ocr_and_names_the_setting(extract: Extract) -> None:
    scan = typeset([Sheet([Line(500, 20, f"{n}")], picture=True) for n in range(4)])
    error = await extract.refused("scan.pdf", scan)
    assert error.code == "needs_ocr"
    assert "PENSTOCK_EXTRACTION_OCR" in str(error)
    mixed = [Sheet(picture=True), *[Sheet([Line(72, 700, text)]) for text in prose("a", 3)]]
    assert (await extract("a.pdf", typeset(mixed))).metadata == {"pages": 4, "pages_without_text": 1}


def path_with_ocrmypdf(folder: Path, script: str) -> str:
    """A PATH on which ``ocrmypdf`` is this shell script; ``$given`` and ``$made`` are its files, ``$beside`` its
    folder."""
    path = folder / "bin" / "ocrmypdf"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nbeside={path.parent}\nfor last; do given="$made"; made="$last"; done\n{script}')
    path.chmod(0o755)
    return f"{path.parent}{os.pathsep}{os.environ['PATH']}"


SCAN = typeset([Sheet(picture=True)])
OCR = SMALL.model_copy(update={"ocr": True})


async def test_ocrmypdf_is_used_when_it_is_installed_and_switched_on(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
        test "$(ulimit -v)" = {OCR.ocr_memory_bytes // 1024} || exit 9
        case "$*" in *--skip-text*) ;; *) exit 1 ;; esac
        grep -q /I1 "$given" && cp "$beside/recognised.pdf" "$made"
    """
    monkeypatch.setenv("PATH", path_with_ocrmypdf(tmp_path, script))
    recognised = typeset([Sheet([Line(72, 700, "What the scan says")], picture=True)])
    (tmp_path / "bin" / "recognised.pdf").write_bytes(recognised)
    assert (await extract.refused("scan.pdf", SCAN)).code == "needs_ocr"
    extracted = await extract("scan.pdf", SCAN, OCR)
    assert (extracted.text, extracted.metadata) == ("What the scan says", {"pages": 1, "ocr": True})


async def test_scans_hold_no_thread_in_which_other_files_are_read(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many scans as there are threads kept everybody's files from being read for ten minutes, again and again, and
    with them the revocations that sweeps find behind files."""
    script = """
        while ! test -e "$beside/go"; do sleep 0.05; done
        cp "$beside/recognised.pdf" "$made"
    """
    monkeypatch.setenv("PATH", path_with_ocrmypdf(tmp_path, script))
    (tmp_path / "bin" / "recognised.pdf").write_bytes(typeset([Sheet([Line(72, 700, "What the scan says")])]))
    one = OCR.model_copy(update={"at_once": 1})
    for name in "abc":
        (tmp_path / name).mkdir()
    scans = [asyncio.create_task(Extract(tmp_path / name)("scan.pdf", SCAN, one)) for name in "abc"]
    await asyncio.sleep(0.5)
    other = await extract("other.pdf", typeset([Sheet([Line(72, 700, "What another file says")])]), one)
    assert other.text == "What another file says"
    assert not any(scan.done() for scan in scans)
    (tmp_path / "bin" / "go").touch()
    assert [scan.text for scan in await asyncio.gather(*scans)] == ["What the scan says"] * 3


async def test_ocr_can_write_only_to_its_own_folder_and_read_no_secrets(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("a token")
    for name in ("share/keyrings", "share/tessdata", "lib"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("a token, or a model")
    script = f"""
        cat {tmp_path}/share/tessdata/file || exit 6
        for name in share/keyrings/file lib/file; do cat {tmp_path}/$name && exit 7; done
        chmod 777 {tmp_path}/share/keyrings/file && exit 8
        touch -d 2001-01-01 {tmp_path}/share/tessdata/file && exit 9
        setsid -w true && exit 16
        cat {tmp_path}/secret && exit 1
        cat /etc/passwd && exit 2
        cat /proc/$PPID/environ && exit 3
        echo planted > "$beside/planted" && exit 4
        kill -0 $PPID && exit 5
        exit 15
    """
    monkeypatch.setenv("PATH", path_with_ocrmypdf(tmp_path, script))
    assert "it reports no cause" in str(await extract.refused("scan.pdf", SCAN, OCR))
    assert not (tmp_path / "bin" / "planted").exists()


async def test_ocr_output_that_is_a_link_to_another_file_or_a_pipe_is_refused(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan that has taken over OCR would publish another tenant's upload as its own text."""
    (tmp_path / "another.pdf").write_bytes(typeset([Sheet([Line(72, 700, "What another tenant uploaded")])]))
    script = f"""
        test -e "$beside/pipe" && exec mkfifo "$made"
        cat {tmp_path}/another.pdf && exit 1
        ln -s {tmp_path}/another.pdf "$made"
    """
    monkeypatch.setenv("PATH", path_with_ocrmypdf(tmp_path, script))
    error = await extract.refused("scan.pdf", SCAN, OCR)
    assert (error.code, "another tenant" in str(error)) == ("needs_ocr", False)
    (tmp_path / "bin" / "pipe").touch()
    assert (await extract.refused("scan.pdf", SCAN, OCR)).code == "needs_ocr"


async def test_ocr_that_nests_folders_endlessly_is_refused_and_leaves_no_files(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
        (umask 0477 && mkdir hidden) && mkdir hidden/inner || exit 1
        i=0; while [ $i -lt 1500 ]; do mkdir d && cd d || exit 1; i=$((i+1)); done
        exit 15
    """
    monkeypatch.setenv("PATH", path_with_ocrmypdf(tmp_path, script))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert "it reports no cause" in str(await extract.refused("scan.pdf", SCAN, OCR))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_very_many_files_that_ocr_leaves_are_removed_in_little_memory(tmp_path: Path) -> None:
    """Ten minutes of empty files, 280 bytes each in a list of them, were more than the memory of the service."""
    for name in ("", "a", "a/b"):
        (tmp_path / name).mkdir(exist_ok=True)
        for number in range(5_000):
            os.mknod(tmp_path / name / f"{number:0100}")
    tracemalloc.start()
    try:
        sandbox._empty(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []
    assert peak < 200_000


def test_all_processes_of_ocr_have_ended_when_its_folder_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was still dying could go on with a write to the folder, which then stayed."""
    script = "(yes | head -c 150000000; sleep 60) | tail -c 160000000 &\nsleep 2\nexit 15"
    monkeypatch.setenv("PATH", path_with_ocrmypdf(tmp_path, script))
    killed: list[psutil.Process] = []

    def kill(group: int, number_of_signal: int) -> None:
        killed.extend(p for p in psutil.process_iter() if os.getpgid(p.pid) == group and p.pid != group)
        killpg(group, number_of_signal)

    def is_alive(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    killpg = os.killpg
    monkeypatch.setattr(os, "killpg", kill)
    with (tmp_path / "a.pdf").open("wb+") as file:
        job = sandbox.Job(file, "pdf", OCR)
        job._watch("run", tmp_path / "bin", OCR.ocr_limits(), [str(tmp_path / "bin" / "ocrmypdf")])
        alive = [process for process in killed if is_alive(process)]
    assert len(killed) >= 2
    assert alive == []


async def test_ocr_runs_in_the_virtual_environment_that_its_symlink_points_to(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pipx and uv install it: below ``~/.local/share``, of which nothing else may be read."""
    home = tmp_path / ".local"
    venv.create(home / "share" / "tools" / "ocrmypdf", symlinks=True)
    installed = home / "share" / "tools" / "ocrmypdf" / "bin"
    (home / "share" / "secret").write_text("a token")
    (installed / "ocrmypdf").write_text(f"""#!{installed}/python
import email, json, subprocess, sys, threading
one = threading.Thread(target=lambda: subprocess.run(["true"], check=True))
one.start(), one.join()
try:
    open("{home}/share/secret")
except PermissionError:
    sys.exit(15)
""")
    (installed / "ocrmypdf").chmod(0o755)
    (home / "bin").mkdir()
    (home / "bin" / "ocrmypdf").symlink_to(installed / "ocrmypdf")
    monkeypatch.setenv("PATH", f"{home}/bin{os.pathsep}{os.environ['PATH']}")
    assert "it reports no cause" in str(await extract.refused("scan.pdf", SCAN, OCR))


async def test_ocr_that_is_missing_fails_or_hangs_gives_a_clear_error(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in str(await extract.refused("scan.pdf", SCAN, OCR))
    monkeypatch.undo()
    sleep = ["sleep", f"{1000 + os.getpid()}.25"]
    script = f'test -e "$beside/endless" || exit 3\n{" ".join(sleep)} &\nwait'
    monkeypatch.setenv("PATH", path_with_ocrmypdf(tmp_path, script))
    assert "missing" in str(await extract.refused("scan.pdf", SCAN, OCR))
    (tmp_path / "bin" / "endless").touch()
    error = await extract.refused("scan.pdf", SCAN, OCR.model_copy(update={"ocr_wall_seconds": 5}))
    assert "more than 5 s" in str(error)
    await until(lambda: not any(process.info["cmdline"] == sleep for process in psutil.process_iter(["cmdline"])))


async def test_sentences_continue_across_pages_and_contents_entries_are_no_headings(extract: Extract) -> None:
    full = "a sentence of many words that fills the whole width of its column and goes on, line after line, until"
    first = Sheet(
        [Line(72, 700, "1 Introduction . . . . . . . . . . . . 7", 16), Line(72, 650, full), Line(72, 638, full)]
    )
    second = Sheet(
        [Line(72, 700, "it ends on the next page."), Line(72, 640, "Bold", bold=True), Line(100, 640, "is a word.")]
    )
    extracted = await extract("a.pdf", typeset([first, second]))
    assert extracted.text == f"1 Introduction … 7\n\n{full} {full} it ends on the next page.\n\nBold is a word."
