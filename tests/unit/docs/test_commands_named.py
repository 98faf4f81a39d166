"""Commands that the documentation names exist, with the options that it gives them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from typer._click import Context
from typer.core import TyperGroup
from typer.main import get_group

from cli.main import app

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
NAMED = re.compile(r"(?:^\s*(?:\$ )?|[`(|]\s*)penstock ([a-z][^`\n]*)", re.MULTILINE)
END = re.compile(r"\s(?:#|\||>|&|2>|\\|·)|[;…]|\.\s|$")
"""Where a command's own words end: a comment, a pipe, a redirection, an ellipsis."""


@cache
def commands() -> tuple[TyperGroup, Context]:
    root = get_group(app)
    return root, Context(root, info_name="penstock")


def problem(line: str) -> str | None:
    """Return what is wrong with a command's words after ``penstock``, if anything is."""
    root, context = commands()
    words = line[: END.search(line).start()].split()  # type: ignore[union-attr]
    command = root.get_command(context, words[0].strip(",.:)"))
    if command is None:
        return f"there is no command {words[0]!r}"
    rest = words[1:]
    while rest and isinstance(command, TyperGroup) and rest[0] in command.commands:
        command = command.commands[rest.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    options = [word.partition("=")[0].strip("`,.)[]") for word in rest if word.strip("[").startswith("--")]
    unknown = [option for option in options if option not in {*known, "--help"}]
    return f"{words[0]}: there is no option {', '.join(unknown)}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_that_a_page_names_exists(page: Path) -> None:
    lines = [match[1] for match in NAMED.finditer(page.read_text())]
    assert [wrong for line in lines if (wrong := problem(line))] == []


@pytest.mark.parametrize(
    "line", ["serach x", "search x --collection y", "dead replay --everything", "up --json --no-such"]
)
def test_a_command_or_an_option_that_does_not_exist_is_noticed(line: str) -> None:
    assert problem(line)
