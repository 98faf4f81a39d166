"""An error of a source's own code is shown with the place in that code, and to its developer with its text."""

from __future__ import annotations

import ast
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from lxml import etree
from pydantic import SecretStr

from cli.output import print_fault
from connectors.base import SmallSource
from connectors.declared import load, source_class
from connectors.faults import NotImported, foreign, place, trace
from connectors.operate import check_all
from connectors.source import Entry, Listed
from pipeline.core.errors import Misconfigured
from pipeline.runtime.settings import PostgresSettings

NOWHERE = PostgresSettings(dsn=SecretStr("postgresql://nowhere.invalid/penstock"))
LINE = "        return json.loads(external_id)"


class Desk(SmallSource):
    async def list(self) -> AsyncIterator[Sequence[Listed]]:
        yield [Listed(external_id="{Quokka", acl_tags=["staff"])]

    async def read(self, external_id: str) -> Entry:
        return json.loads(external_id)  # type: ignore[no-any-return]


def checked(folder: Path, kind: str) -> tuple[str, list[BaseException]]:
    (folder / "connectors.toml").write_text(f'[connector.desk]\nkind = "{kind}"\n')
    faults: list[BaseException] = []
    plan = load(folder / "connectors.toml").plan("desk")
    [problem] = asyncio.run(check_all([plan], None, NOWHERE, on_fault=faults.append))["desk"]
    return problem.message, faults


def test_an_error_in_a_library_is_shown_at_the_line_of_the_source_that_called_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It named a line of the library, or of Penstock, and there was no way to the traceback."""
    line = 1 + Path(__file__).read_text().split("\n").index(LINE + "  # type: ignore[no-any-return]")
    message, [fault] = checked(tmp_path, f"{__name__}:Desk")
    assert message.startswith(f"JSONDecodeError at test_faults.py:{line}: a bug in the connector's code")
    assert "Quokka" not in message, "it may quote content"
    print_fault(fault)
    shown = capsys.readouterr().err
    assert LINE.strip() in shown
    assert "Expecting property name" in shown
    assert "base.py" not in shown, "it begins in the source's own code"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Desk:\n    def list(self)\n        pass\n", "SyntaxError at odd_desk.py:2 (expected ':')"),
        ("import os\n\nKEY = os.environ['NO_SUCH_KEY_']\n", "KeyError at odd_desk.py:3"),
    ],
)
def test_a_module_that_cannot_be_imported_is_shown_with_its_own_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    """`SyntaxError at <frozen importlib._bootstrap>:241`, and a traceback of Penstock's own from conform."""
    (tmp_path / "odd_desk.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    message, [fault] = checked(tmp_path, "odd_desk:Desk")
    assert message == f"kind 'odd_desk:Desk': odd_desk cannot be imported: {said}"
    assert place(fault) in said
    assert "importlib" not in trace(fault)
    with pytest.raises(NotImported):
        source_class("odd_desk:Desk")
    sys.modules.pop("odd_desk", None)


def test_an_error_that_says_what_to_do_has_no_traceback() -> None:
    error = Misconfigured("set another token")
    error.__cause__ = OSError()
    assert foreign(error) is None


@pytest.mark.parametrize("parse", [etree.parse, lambda name: ast.parse(Path(name).read_text(), filename=name)])
def test_the_place_of_an_error_is_never_the_file_of_a_document(tmp_path: Path, parse: Callable[[str], object]) -> None:
    """`XMLSyntaxError at Merger with Falcon.xml:1` in the log and in the status: parsers name their file."""
    document = tmp_path / "Merger with Falcon.xml"
    document.write_text("<a><b></a>")
    with pytest.raises(SyntaxError) as error:
        parse(str(document))
    assert place(error.value).startswith(f"{type(error.value).__name__} at ")
    assert "Falcon" not in place(error.value)
