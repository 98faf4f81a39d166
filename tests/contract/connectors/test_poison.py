"""One document's data never stops its source: poison in the answers of every service that has a fake.

Several documents have a field each that holds what nobody expects, between others that are as they should be. A new
kind whose playground has ``misbehaving`` is tested without more.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, cast

import pytest

from connectors.conform.memory_runner import InMemory, MemoryRunner, readable
from connectors.conform.misbehaviour import QUICK
from connectors.declared import BUILT_IN, options, source_class
from connectors.set_aside import SetAside
from connectors.source import Context, Source
from tests.support.connectors.poison import Poisoner, is_loud

VARIANTS = ("connectors.confluence.playground:ConfluenceDataCenter", "connectors.jira.playground:JiraDataCenter")
NO_JSON = {
    "airbyte": "tests/contract/connectors/airbyte",
    "conversations": "",
    "database": "tests/unit/connectors/test_rows.py",
    "folder": "tests/unit/connectors/runner/test_isolate.py",
    "git": "tests/unit/connectors/git",
    "objects": "tests/contract/connectors/objects",
    "uploads": "tests/contract/connectors/uploads",
    "web": "tests/contract/connectors/website",
}
"""Kinds whose services answer with something else, and where their hostile data are tested."""
SERVICES = sorted({*BUILT_IN, *VARIANTS} - NO_JSON.keys())
OFFSETS = range(0, 30, 3)
QUICKLY = frozenset((kind, 0) for kind in SERVICES)
GOOD = ("aaa", "good-1", "good-2", "good-3", "zzz")
POISONED = tuple(f"poisoned-{number}" for number in range(6))


HELD_BY_PLACES = {"github": "number"}
"""Kinds whose playground has a place for each document, with a field that the documents have in answers."""


def item_id(external_id: str) -> str:
    return re.split("[:/]", external_id)[-1]


@pytest.mark.parametrize(
    ("kind", "offset"),
    [
        pytest.param(kind, offset, marks=() if (kind, offset) in QUICKLY else pytest.mark.slow)
        for kind in SERVICES
        for offset in OFFSETS
    ],
)
async def test_documents_with_poison_are_set_aside_and_all_others_are_read(
    kind: str, offset: int, tmp_path: Path
) -> None:
    """A page with a number of 5,000 digits, an odd date or half of a character stopped its whole source for ever."""
    cls: type[Source] = source_class(kind)
    async with cast(Any, cls).playground() as play:
        names = [name for pair in zip(GOOD, POISONED, strict=False) for name in pair] + [*POISONED[len(GOOD) :]]
        ids = {name: await play.write(name, f"About {name}.\n\nIt is short.") for name in names}
        good, poisoned = {ids[name] for name in GOOD}, {ids[name] for name in POISONED}
        before = runner_of(cls, play, tmp_path / "before")
        first = runner_of(cls, play, tmp_path / "first")
        try:
            assert await before.full(), before.status
            groups = await before.groups()
            assert groups is not None
            readers = {who: readable(before, who, groups) for who in (play.inside, play.outside)}
            assert good | poisoned <= readers[play.inside]
            poisoner = play.misbehaving.app = Poisoner(
                play.misbehaving.app,
                [re.split("[:/]", ids[name])[0 if kind in HELD_BY_PLACES else -1] for name in POISONED],
                offset,
                HELD_BY_PLACES.get(kind),
            )
            loud = {ids[name] for n, name in enumerate(POISONED) if is_loud(poisoner.poison_of(n))}

            assert await first.full(), first.status
            for name in names:
                await play.write(name, "It was edited.")
            began = before.progress.changes_cursor
            for runner in (before, first):
                assert await runner.changes(), runner.status
                assert await runner.sweep(), runner.status
            if (listed := await before.groups()) is not None:
                groups = listed
            assert poisoner.shown, "nothing was poisoned"

            for runner in (before, first):
                edited = {id_ for id_, entry in runner.published.items() if "It was edited." in entry.content}
                assert good <= edited, f"{len(good - edited)} good documents are not read: {runner.status}"
                assert not runner.deleted, f"deleted: {poisoner.shown} {runner.status}"
                for id_ in loud - edited:
                    row = runner.rows.get(id_)
                    is_shown = (row is not None and row.problem_code) or item_id(id_) in runner.status
                    assert is_shown, f"{poisoner.shown}: nothing shows that {id_} is not read: {runner.status}"
            for who, might_read in readers.items():
                assert readable(before, who, groups) <= might_read
            assert before.progress.changes_cursor != began or began is None
            assert before.isolated.failing is None

            play.misbehaving.app = poisoner.app
            for runner in (before, first):
                assert await runner.changes(), runner.status
                assert await runner.sweep(), runner.status
                assert await runner.sweep(), runner.status
                groups = await runner.groups()
                assert readable(runner, play.inside, groups or []) == readers[play.inside], runner.status
                assert not runner.set_aside.reasons()
        finally:
            await before.source.close()
            await first.source.close()


def runner_of(cls: type[Source], play: Any, folder: Path) -> MemoryRunner:
    folder.mkdir()
    set_aside = SetAside()
    context = Context(name="s", tenant="t", memory=InMemory(), folder=folder, set_aside=set_aside)
    settings = options(cls, play.options, "s", play.environment)
    limits = {"limits": QUICK} if "limits" in inspect.signature(cls).parameters else {}
    return MemoryRunner(cast(Any, cls)(settings, context, **limits), set_aside)
