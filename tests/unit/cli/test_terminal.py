"""Output of commands cannot control the terminal: a name may hold a sequence that fills the clipboard or hides text."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import structlog
import typer
from rich.table import Table

from cli import output
from cli.console import SafeConsole
from cli.terminal import harmless, harmless_json

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
    assert CONTROL.findall(shown.getvalue()) == []
    assert shown.getvalue().count("\N{REPLACEMENT CHARACTER}31mc") == 4


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


def test_every_console_of_the_commands_is_a_safe_one() -> None:
    """That of ``penstock search`` replaces control characters in each text itself."""
    own = {"console.py", "search_show.py"}
    plain = re.compile(r"(?<!Safe)\bConsole\(")
    assert [path.name for path in FOLDER.glob("*.py") if path.name not in own and plain.search(path.read_text())] == []


def test_lines_and_tabs_of_a_text_stay() -> None:
    assert harmless("a\n\tb") == "a\n\tb"
    assert harmless_json('{"ü": "\x9b"}') == '{"ü": "\\u009b"}'
