"""Output of commands cannot control the terminal: a name may hold a sequence that fills the clipboard or hides text."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import structlog
import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cli import output, search_show
from cli.console import SafeConsole
from cli.terminal import echo, harmless, harmless_json

HOSTILE = "a\x1b]52;c;aGk=\x07b\x9b31mc\x7fd\re\nf\tg\u202efdp.exe\u2066h\u200f"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
FOLDER = Path(output.__file__).parent


def test_no_printed_text_and_no_cell_of_a_table_controls_the_terminal() -> None:
    shown = io.StringIO()
    console = SafeConsole(file=shown, highlight=False, width=200)
    console.print(HOSTILE, markup=False)
    console.print(f"[bold]{HOSTILE}[/]", HOSTILE, soft_wrap=True)
    table = Table("name")
    table.add_row(HOSTILE)
    console.print(table)
    console.print(Padding(Text(HOSTILE, "bold"), 1))
    assert CONTROL.findall(shown.getvalue()) == []
    assert shown.getvalue().count("\N{REPLACEMENT CHARACTER}31mc") == 5


def test_a_styled_text_keeps_its_style_and_loses_what_controls_the_terminal() -> None:
    shown = io.StringIO()
    SafeConsole(file=shown, highlight=False, force_terminal=True, color_system="standard").print(Text(HOSTILE, "bold"))
    assert shown.getvalue().startswith("\x1b[1ma\N{REPLACEMENT CHARACTER}]52;")
    assert CONTROL.findall(shown.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")) == []


def test_nothing_that_a_search_shows_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A value of a facet is whatever a document has in its metadata."""
    result = {
        **dict.fromkeys(
            ("title", "external_id", "source_url", "source", "text", "author", "source_modified_at"), HOSTILE
        ),
        "ranks": {HOSTILE: 1},
        "rerank_score": None,
        "score": 1.0,
        "headings": [HOSTILE],
        "also": [{"title": None, "external_id": HOSTILE}],
    }
    source = {"source": HOSTILE, "lags": [HOSTILE], "has_gaps": True}
    response = {
        "results": [result],
        "relevant": True,
        "facets": {HOSTILE: {"values": [{"value": HOSTILE, "count": 1}], "complete": True}},
        "cursor": HOSTILE,
        "degraded": [HOSTILE],
        "freshness": [source | {"complete_until": HOSTILE, "access_until": HOSTILE}],
        "steps": [{"step": HOSTILE, "took_ms": 1}],
        "took_ms": 1.0,
    }
    search_show.show(response, HOSTILE, HOSTILE, [HOSTILE])
    search_show.show(response | {"results": []}, HOSTILE, HOSTILE, [HOSTILE])
    printed = capsys.readouterr().out
    assert "]52;c;aGk=" in printed
    assert CONTROL.findall(printed) == []


def test_no_message_of_a_command_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    echo(HOSTILE)
    echo(HOSTILE, err=True, nl=False)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{harmless(HOSTILE)}\n", harmless(HOSTILE))


def test_json_and_warnings_of_a_command_do_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"title": HOSTILE})
    printed = capsys.readouterr().out
    assert (CONTROL.findall(printed), json.loads(printed)) == ([], {"title": HOSTILE})
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None, invoke_without_command=True)))
    output.log_warnings_to_stderr(context)
    try:
        structlog.get_logger().warning("problem_reported", path=HOSTILE)
        logged = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().err)  # colours of the renderer
    finally:
        context.close()
    assert "problem_reported" in logged
    assert CONTROL.findall(logged) == []


def test_commands_print_only_through_what_is_safe() -> None:
    own = {"console.py", "terminal.py"}
    unsafe = re.compile(r"(?<!Safe)\bConsole\(|\b(?:typer|click)\.(?:echo|secho)\b|(?<![\w.])print\(")
    assert [path.name for path in FOLDER.glob("*.py") if path.name not in own and unsafe.search(path.read_text())] == []


def test_lines_and_tabs_of_a_text_stay() -> None:
    assert harmless("a\n\tb") == "a\n\tb"
    assert harmless_json('{"ü": "\x9b"}') == '{"ü": "\\u009b"}'
