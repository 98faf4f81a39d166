"""Bytes → text: what is read, what is refused, and that nothing is read wrongly."""

from __future__ import annotations

import encodings
import io
import pkgutil
import sys
import time
import zipfile
from encodings.aliases import aliases

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.extract import Unreadable, extract
from connectors.extraction import sandbox
from connectors.extraction.settings import ExtractionSettings
from tests.support.connectors.pdf_files import encrypted_pdf, pdf_of
from topics.messages import MAX_CONTENT_BYTES

FRENCH = "Le café était fermé à cause de la grève générale. Où êtes-vous allés déjeuner hier après-midi ?"
RUSSIAN = "Привет, как дела? Сегодня хорошая погода и мы идём гулять в парк. " * 5
JAPANESE = "これは日本語のテキストです。今日は天気がいいので、公園に行きましょう。" * 20
POLISH = "Zażółć gęślą jaźń. Dzisiaj jest ładna pogoda i idziemy na spacer do parku, żeby odpocząć. " * 3
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy. Dnes je hezké počasí a jdeme na procházku do parku. " * 3
TURKISH = "Bugün hava çok güzel, parkta yürüyüşe çıkıyoruz. İstanbul'da yaşıyoruz ve işe gidiyoruz. " * 3
HUNGARIAN = "Ma szép idő van, és sétálni megyünk a parkba. Árvíztűrő tükörfúrógép, ahogy mondják. " * 3
ROMANIAN = "Astăzi este o vreme frumoasă şi mergem în parc cu toţi prietenii noştri. " * 3
KOREAN = "안녕하세요. 오늘은 날씨가 좋아서 공원에 갑니다. " * 20
GREEK = "Καλημέρα, σήμερα ο καιρός είναι καλός και πάμε βόλτα στο πάρκο. " * 3


def refused(data: bytes, name: str = "a.txt") -> str:
    with pytest.raises(Unreadable) as caught:
        extract(data, name)
    assert "\n" not in str(caught.value)
    return caught.value.code


def outcome(data: bytes, name: str = "a.txt") -> str:
    """The text, or the code of the refusal."""
    try:
        return extract(data, name).text
    except Unreadable as error:
        return error.code


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_is_decoded_by_its_byte_order_mark(encoding: str) -> None:
    assert extract(JAPANESE.encode(encoding), "a.txt").text == JAPANESE


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (FRENCH, "cp1252"),
        (FRENCH, "latin-1"),
        ("Der Fußgänger läuft über die Straße.", "cp1252"),
        ("The company’s policy — as of today — is “no comment”. " * 3, "cp1252"),
        (RUSSIAN, "cp1251"),
        (RUSSIAN, "koi8-r"),
        (JAPANESE, "shift_jis"),
        (JAPANESE, "euc-jp"),
        (JAPANESE, "iso2022_jp"),
        (GREEK, "cp1253"),
        (POLISH, "cp1250"),
        (CZECH, "cp1250"),
    ],
)
def test_legacy_encodings_are_decoded_when_detection_is_certain(text: str, encoding: str) -> None:
    assert extract(text.encode(encoding), "a.txt").text == text


@pytest.mark.parametrize(
    "text", [FRENCH, RUSSIAN, JAPANESE, POLISH, CZECH, TURKISH, HUNGARIAN, ROMANIAN, KOREAN, GREEK]
)
@pytest.mark.parametrize("words", [1, 5, 1000])
def test_text_in_a_legacy_encoding_is_decoded_correctly_or_refused(text: str, words: int) -> None:
    """Short or long, in whatever encoding can write it: the right text or a refusal."""
    text = " ".join(text.split()[:words]) if words < 1000 else text
    for encoding in (
        "cp1250",
        "cp1251",
        "cp1252",
        "cp1253",
        "cp1254",
        "iso8859-2",
        "iso8859-5",
        "iso8859-9",
        "koi8-r",
        "cp866",
        "cp437",
        "mac_roman",
        "shift_jis",
        "euc-jp",
        "euc-kr",
        "gb18030",
        "big5",
    ):
        try:
            data = text.encode(encoding)
        except UnicodeEncodeError:
            continue
        assert outcome(data) in (text, "encoding", "binary"), encoding


def test_an_encoding_declared_in_the_file_is_used() -> None:
    html = '<html><head><meta charset="iso-8859-2"><title>ż</title></head></html>'
    assert extract(html.encode("iso-8859-2"), "a.html").text == html
    python = "# -*- coding: iso-8859-9 -*-\nname = 'ş'\n"
    assert extract(python.encode("iso-8859-9"), "a.py").text == python
    assert refused(b"<meta charset=utf-8>\xff\xfe\xfd", "a.html") == "encoding"


NAMES = sorted({module.name for module in pkgutil.iter_modules(encodings.__path__)} | set(aliases))
PIECES = (
    b"x\xff",
    b"a" * 3000 + b"\xff",
    b"\\ud800 \\N{x} +2AA- \xff",
    b"xn--zzz." * 20_000 + b"\xff",
    b"\xd8\x00\xff",
)


def test_no_file_declares_itself_a_conversation() -> None:
    """Each of its messages, two million in 4 MiB, would be a chunk of its own."""
    data = b"Shall we ship? " * 50 + b"\x1ea" * 3
    assert extract(data, "a", "text/troff").media_type == "text/troff"
    assert extract(data, "a", "text/x-penstock-messages; charset=utf-8").media_type == "text/plain"


@pytest.mark.parametrize("piece", PIECES, ids=range(len(PIECES)))
def test_a_file_that_declares_any_python_codec_is_read_or_refused_quickly(piece: bytes) -> None:
    """Some of them raise what no caller expects, and one such file kept its source from being read to the end."""
    for name in NAMES:
        began = time.process_time()
        outcome(b"# coding: " + name.encode() + b"\n" + piece).encode()
        assert time.process_time() - began < 1, name


def test_damaged_utf8_is_refused() -> None:
    assert refused("naïve café, déjà vu".encode()[:-1] + b"\xff und so weiter") == "encoding"
    assert refused("日本語".encode()[:-1]) == "encoding"
    assert refused("日本語".encode("utf-16") + b"\xd8") == "encoding"


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n" + b"abc" * 50,
        b"PK\x03\x04" + b"x" * 100,
        b"text with a \x00 in it",
        bytes(range(1, 256)) * 9,
        b"\x7fELF\x02\x01\x01",
        b"\x01\x02\x03\x04\x05\x06" * 40,
        "a\x00b".encode("utf-16"),
    ],
)
def test_binary_data_with_a_text_file_name_is_refused(data: bytes) -> None:
    assert refused(data) == "binary"


@settings(deadline=None)  # a PDF starts a process
@given(st.binary(max_size=4000))
def test_any_bytes_give_text_or_a_reason(data: bytes) -> None:
    text = outcome(data)
    if text not in ("binary", "encoding", "empty", "broken", "truncated"):
        assert text.strip()
        assert "\x00" not in text
        text.encode("utf-8")


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=500).filter(lambda t: t.strip()))
def test_utf8_is_read_exactly(text: str) -> None:
    text = text.lstrip("\ufeff")
    if text.strip():
        assert extract(text.encode(), "a.txt").text == text


@pytest.mark.parametrize("data", [b"", b" \n\t\r\n ", b"\xef\xbb\xbf"])
def test_a_file_without_text_is_refused_as_empty(data: bytes) -> None:
    assert refused(data) == "empty"


def open_document(kind: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("mimetype", f"application/vnd.oasis.opendocument.{kind}")
        archive.writestr("content.xml", "<office:document-content/>")
    return made.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "format_of_it"),
    [
        ("minutes.odt", open_document("text"), "OpenDocument"),
        ("rates", open_document("spreadsheet"), "OpenDocument"),
        ("deck.pptx", open_document("presentation"), "OpenDocument"),
        ("letter.rtf", rb"{\rtf1\ansi Dear Sir}", "RTF"),
    ],
)
def test_a_format_that_is_not_read_is_named_to_its_owner(name: str, data: bytes, format_of_it: str) -> None:
    """The file was said to be no text, because it holds NUL bytes."""
    with pytest.raises(Unreadable, match=f"is an {format_of_it} file: save it as") as caught:
        extract(data, name)
    assert caught.value.code == "unsupported"


def test_the_size_limit_counts_the_bytes_of_the_published_utf8() -> None:
    assert len(extract(b"x" * MAX_CONTENT_BYTES, "a.txt").text) == MAX_CONTENT_BYTES
    assert refused(b"x" * (MAX_CONTENT_BYTES + 1)) == "too_large"
    assert refused(("ж" * (MAX_CONTENT_BYTES // 2 + 1)).encode("utf-16")) == "too_large"
    assert extract(("x" * MAX_CONTENT_BYTES).encode("utf-32"), "a.txt").media_type == "text/plain"


def test_a_line_of_a_megabyte_is_read() -> None:
    assert len(extract(b"word " * 200_000, "a.txt").text) == 1_000_000


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.md", "x", "text/markdown"),
        ("A.RST", "x", "text/x-rst"),
        ("a.csv", "a,b", "text/csv"),
        ("a.tsv", "a\tb", "text/tab-separated-values"),
        ("a.jsonl", "{}", "application/x-ndjson"),
        ("a.json", "{}", "application/json"),
        ("a.py", "x=1", "text/x-python"),
        ("a.tsx", "x", "text/tsx"),
        ("a.h", "int x;", "text/x-c"),
        ("a.hpp", "x", "text/x-c++"),
        ("a.sql", "x", "application/sql"),
        ("run", "#!/usr/bin/env python3\nx=1", "text/x-python"),
        ("run", "#!/bin/sh\nls", "application/x-sh"),
        ("run", "#!/usr/bin/env -S node --x\n", "text/javascript"),
        ("page", "<!DOCTYPE html><p>x", "text/html"),
        ("page", "<?xml version='1.0'?>\n<!-- a --><!-- b -->\n<HTML>", "text/html"),
        ("data", '{"a": [1]}', "application/json"),
        ("data", '{"a":1}\n{"a":2}\n', "application/x-ndjson"),
        ("data", "{not json", "text/plain"),
        ("README", "# x", "text/plain"),
        ("a.unknown", "x", "text/plain"),
        (".hidden", "x", "text/plain"),
        ("folder.py/name", "x", "text/plain"),
    ],
)
def test_the_media_type_follows_from_the_name_or_the_content(name: str, text: str, expected: str) -> None:
    assert extract(text.encode(), name).media_type == expected


@pytest.mark.parametrize(
    ("name", "text", "title", "author"),
    [
        ("a.md", "intro\n\n# The *real* [title](x) `here` #\n\n## no", "The real title here", None),
        ("a.md", "```\n# a comment\n```\n\nTitle\n=====\n", "Title", None),
        ("a.md", "---\ntitle: 'From: above'\nauthors: [Ada, \"Bob\"]\n---\n# Other", "From: above", "Ada, Bob"),
        ("a.md", "no heading at all", None, None),
        ("a.rst", "==========\n The title\n==========\n\n:Author: Ada\n\nText", "The title", "Ada"),
        ("a.rst", "Text first\n\nA section\n---------\n", "A section", None),
        ("a.html", '<title>\n A &amp; B </title><meta name="author" content="Ada &lt;x&gt;">', "A & B", "Ada <x>"),
        ("a.html", "<title> </title><h1>The <b>first</b></h1>", "The first", None),
        ("a.txt", "# not a heading here", None, None),
    ],
)
def test_title_and_author_are_read_from_headings_and_headers(
    name: str, text: str, title: str | None, author: str | None
) -> None:
    extracted = extract(text.encode(), name)
    assert (extracted.title, extracted.author) == (title, author)
    assert extract(text.replace("\n", "\r\n").encode(), name).title == title


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["a.md", "a.rst", "a.html", "a.txt", "unnamed"])
@pytest.mark.parametrize(
    "unit",
    [
        "<!-- x -->\n",
        "<!--",
        "```\n",
        "`",
        "# a ",
        "#! env -a ",
        "[",
        "<",
        "<title>",
        "<meta name=author ",
        "<h1 ",
        "=",
        "=\n",
        "a\n=\n",
        "\x1b$B",
        "---\n",
        "title:",
        "é",
        "{",
        "[[",
        '{"a":',
        "\t ",
        "env/",
    ],
)
def test_no_repeated_markup_makes_extraction_slow(name: str, unit: str) -> None:
    """Seen: a page of comments in a file without an ending kept a scan busy for ten minutes."""
    for text in (
        unit * (200_000 // len(unit)),
        "#! # <title " + unit + " " * 100_000 + "x",
        "<!-- x -->\n" * 40 + unit,
    ):
        began = time.process_time()
        outcome(text.encode(), name)
        assert time.process_time() - began < 3


def test_a_title_is_one_line_of_bounded_length() -> None:
    title = extract(("# " + "word " * 1000).encode(), "a.md").title
    assert title is not None
    assert 490 < len(title) <= 500


def test_a_pdf_is_read_with_its_title_author_and_page_count() -> None:
    extracted = extract(pdf_of(["First page, says hello", "Second page"], title="On greeting", author="Ada"), "a.bin")
    assert extracted.text == "First page, says hello\n\nSecond page"
    assert (extracted.media_type, extracted.title, extracted.author) == ("text/plain", "On greeting", "Ada")
    assert extracted.metadata == {"pages": 2}


def test_a_pdf_without_text_needs_ocr() -> None:
    assert refused(pdf_of(["", "", ""]), "scan.pdf") == "needs_ocr"


def test_an_encrypted_broken_or_truncated_pdf_is_refused() -> None:
    assert refused(encrypted_pdf(), "secret.pdf") == "encrypted"
    assert refused(b"%PDF-1.7\n" + b"\x00garbage" * 100, "a.pdf") == "broken"
    assert refused(pdf_of(["text"])[:120], "cut.pdf") == "truncated"


def test_a_pdf_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PROGRAM", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(sandbox, "from_environment", lambda: ExtractionSettings(wall_seconds=1))
    assert refused(pdf_of(["text"]), "a.pdf") == "too_slow"


def test_a_pdf_that_crashes_its_reader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(sandbox, "PROGRAM", (sys.executable, "-c", program))
    ballast = b"x" * int(0.7 * ExtractionSettings().limits().memory_bytes)  # a reader's memory is not its worker's
    assert refused(pdf_of(["text"]), "a.pdf") == "crashed"
    assert ballast


def test_a_text_that_our_code_fails_on_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file would stop the reading of its source, and so every revocation in it."""

    def failing(text: str, media_type: str) -> None:
        raise ValueError(f"quotes {text}")

    monkeypatch.setattr("connectors.extraction.text.byline", failing)
    with pytest.raises(Unreadable) as unreadable:
        extract(b"secret", "a.txt")
    assert unreadable.value.code == "crashed"
    assert str(unreadable.value).startswith("made its reader fail (ValueError at test_extract.py:")
