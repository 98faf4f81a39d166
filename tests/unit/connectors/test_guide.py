"""The examples of the guide to a connector of one's own run as they are printed."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from pathlib import Path
from typing import Any

import pytest

from connectors.conform.samples import Samples
from connectors.operate import TemporaryMemory
from connectors.source import Context, Document
from penstock import source
from tests.support.space import PROJECT

BLOCKS = re.findall(r"```python\n(.*?)```", (PROJECT / "docs" / "connectors" / "your-own.md").read_text(), re.DOTALL)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"source": source, "secrets": secrets, "asyncio": asyncio, "json": json}
    exec(compile(block, "your-own.md", "exec"), names)  # the guide's own text
    return names


def block_with(text: str) -> str:
    [block] = [block for block in BLOCKS if text in block]
    return str(block)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"Costs 318 euros.", "Repair\n\nCosts 318 euros."), (b"\x00\x01\x02", "Repair\n\n(invoice.txt is not text")],
)
async def test_an_attachment_is_read_as_a_part_of_its_document(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with_attachment = run(block_with("def with_attachment"))["with_attachment"]
    assert (await with_attachment("Repair", tmp_path / "file", "invoice.txt", None)).startswith(expected)


async def test_changes_by_time_report_each_edit_and_continue_from_the_newest(tmp_path: Path) -> None:
    kind = run(block_with("updated_since"))["Tickets"]
    async with kind.playground() as playground:
        samples: Samples = playground
        for name in "abcde":
            await samples.write(name, f"Text of {name}.")
        context = Context(name="desk", tenant="acme", memory=TemporaryMemory(), folder=tmp_path)
        one = kind(kind.Options(**samples.options), context)
        try:
            assert await one.check() == []
            seen, cursor = await changes(one, await one.start())
            assert sorted(seen) == ["a", "b", "c", "d", "e"]
            await samples.write("b", "Another text.")
            seen, cursor = await changes(one, cursor)
            assert seen["b"].content == "Another text."
            assert seen.keys() <= {"b", "e"}, "the newest is reported again"
            assert sorted((await changes(one, cursor))[0]) == ["b"]
        finally:
            await one.close()


async def changes(one: Any, cursor: Any) -> tuple[dict[str, Document], Any]:
    pages = [page async for page in one.changes(cursor)]
    return {entry.external_id: entry for page in pages for entry in page.entries}, pages[-1].cursor
