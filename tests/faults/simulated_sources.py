"""Simulated sources, whose documents and access rules the test knows.

Each is a source of a real kind: a folder, a git repository, a fake Confluence, a fake Slack, or a folder that
``penstock ingest`` publishes. Operations write, edit, revert, remove, restore, restrict and release its documents, and
let its member leave and join. ``expected`` returns what each person must be shown once everything has settled. It is
computed from these operations alone, never from output of the product.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol, cast

from connectors.confluence.playground import ConfluencePlayground
from connectors.declared import source_class
from connectors.folder.playground import FolderPlayground
from connectors.git.playground import GitPlayground
from connectors.slack.playground import SlackPlayground
from connectors.source import Playground
from topics.messages import DocumentUpserted

TENANT = "default"
POLL_SECONDS, SWEEP_SECONDS, GROUPS_SECONDS = 1.0, 4.0, 2.0
"""Short, so that a difference that only a sweep can find is corrected within a scenario's time limit."""
KINDS = {"docs": "folder", "git": "git", "confluence": "confluence", "slack": "slack"}
"""The connector's name (``folder`` itself is reserved for ``penstock ingest``) and its kind."""
INGESTED = "folder"
"""The source under which ``penstock ingest`` publishes."""
CLOSED_BY_MEMBERSHIP = {("slack", "restrict"), *((source, "leave") for source in KINDS)}
"""Pairs (source, operation) that remove a tag from a person and do not change the document's own tags: the tag of a
channel that becomes private is no longer held by the whole workspace."""


class Reversible(Protocol):
    """The operations that revert the withdrawals of access in a playground."""

    async def allow(self, name: str) -> None: ...

    async def join(self) -> None: ...


class _Folder:
    def __init__(self, play: FolderPlayground) -> None:
        self._play = play

    async def allow(self, name: str) -> None:
        (self._play.root / name / ".penstock.toml").unlink(missing_ok=True)

    async def join(self) -> None:
        self._play._write_members([self._play.inside])


class _Git:
    def __init__(self, play: GitPlayground) -> None:
        self._play = play

    async def allow(self, name: str) -> None:
        folder = f"{self._play._paths[name].rpartition('/')[0]}/"
        self._play._secret = [path for path in self._play._secret if path != folder]
        self._play._write_access()

    async def join(self) -> None:
        self._play._members = [self._play.inside]
        self._play._write_access()


class _Confluence:
    def __init__(self, play: ConfluencePlayground) -> None:
        self._play = play

    async def allow(self, name: str) -> None:
        self._play.state.restrict(self._play.state.items[self._play.pages[name]].parent or self._play.pages[name])

    async def join(self) -> None:
        self._play.state.groups["staff"].add(self._play.ines.account_id)


class _Slack:
    def __init__(self, play: SlackPlayground) -> None:
        self._play = play

    async def allow(self, name: str) -> None:
        self._play.workspace.channels[self._play.threads[name][0]].is_private = False

    async def join(self) -> None:
        self._play.workspace.change_user(self._play.ines, is_restricted=False)


_REVERSIBLE: Mapping[str, Any] = {"folder": _Folder, "git": _Git, "confluence": _Confluence, "slack": _Slack}


@dataclass
class IngestFolder:
    """A folder that ``penstock ingest`` publishes; its ``.penstock.toml`` decides whether ``inside`` may read it."""

    root: Path
    inside: str = "ines@example.com"
    outside: str = "otto@example.com"
    removed: dict[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        return ["ingest", str(self.root), "--acl", f"user:{self.inside}", "--tenant", TENANT]

    async def write(self, name: str, text: str) -> str:
        (self.root / f"{name}.md").write_text(text)
        return str((self.root / f"{name}.md").resolve())

    async def remove(self, name: str) -> None:
        path = self.root / f"{name}.md"
        self.removed[name] = path.read_text()
        path.unlink()

    async def restore(self, name: str) -> None:
        await self.write(name, self.removed.pop(name))

    async def leave(self) -> None:
        fresh = self.root / ".fresh.toml"
        fresh.write_text('acl = ["user:nobody@example.com"]\n')
        fresh.replace(self.root / ".penstock.toml")

    async def join(self) -> None:
        (self.root / ".penstock.toml").unlink()


@dataclass
class Page:
    """A document in the state that its source has."""

    name: str
    external_id: str
    text: str
    text_before: str | None = None
    alive: bool = True
    restricted: bool = False

    @property
    def shown(self) -> bool:
        return self.alive and not self.restricted


class SimulatedSource:
    """One source, its documents and its members."""

    def __init__(self, name: str, play: Any, undo: Any) -> None:
        self.name = name
        self.play: Playground = play
        self._undo: Reversible = undo
        self.pages: dict[str, Page] = {}
        self.member = True

    @property
    def person(self) -> str:
        return self.play.inside

    def expected(self) -> dict[str, str]:
        """Return the text of every document that ``person`` must be shown, by its key."""
        return {self.key(page): page.text for page in self.pages.values() if page.shown and self.member}

    def key(self, page: Page) -> str:
        """Return the document's name, which is unique over all sources."""
        return f"{self.name}/{page.external_id}"

    def operations(self, names: list[str]) -> list[tuple[str, str]]:
        """Return the pairs (operation, document's name or "") that the present state allows."""
        possible = [("write", name) for name in names if name not in self.pages or self.pages[name].alive]
        for page in self.pages.values():
            possible.append(("remove" if page.alive else "restore", page.name))
            if page.alive and page.text_before is not None:
                possible.append(("revert", page.name))
            if page.alive and self.name != INGESTED:
                possible.append(("allow" if page.restricted else "restrict", page.name))
        return [*possible, ("leave" if self.member else "join", "")]

    def affected(self, name: str) -> list[Page]:
        """Return the documents whose readers an operation changes: all of them if the member leaves or joins."""
        return [self.pages[name]] if name in self.pages else [] if name else list(self.pages.values())

    def check(self, page: Page, message: DocumentUpserted) -> None:
        """Check that a published message has the content and the fields of the document at its source. Raises
        AssertionError."""
        assert page.text in " ".join(message.content.split()), f"{self.key(page)} is published with another text"
        for name, value in FIELDS[self.name](page, message).items():
            published = getattr(message, name)
            assert published == value, f"{self.key(page)} is published with {name} {published!r} instead of {value!r}"

    async def do(self, operation: str, name: str, text: str) -> None:
        match operation:
            case "write":
                external_id = await self.play.write(name, text)
                page = self.pages.setdefault(name, Page(name, external_id, text))
                page.text, page.text_before = text, page.text
            case "revert":
                page = self.pages[name]
                assert page.text_before is not None
                page.text, page.text_before = page.text_before, page.text
                await self.play.write(name, page.text)
            case "remove":
                await self.play.remove(name)
                self.pages[name].alive = False
            case "restore":
                await self.play.restore(name)
                self.pages[name].alive = True
            case "restrict":
                await self.play.restrict(name)
                self.pages[name].restricted = True
            case "allow":
                await self._undo.allow(name)
                self.pages[name].restricted = False
            case "leave":
                await self.play.leave()
                self.member = False
            case "join":
                await self._undo.join()
                self.member = True
            case _:
                raise ValueError(operation)


def _file(page: Page, message: DocumentUpserted) -> dict[str, object]:
    return {"title": f"{page.name}.md", "author": None, "source_url": Path(page.external_id).as_uri()}


FIELDS: Mapping[str, Callable[[Page, DocumentUpserted], dict[str, object]]] = {
    "docs": _file,
    INGESTED: _file,
    "git": lambda _page, _message: {"title": "page.md", "author": "Ada Author"},
    "confluence": lambda page, _message: {"title": page.name},
    "slack": lambda page, message: {"title": f"{page.text} · {message.title.rpartition(' · ')[2]}"},
}
"""By source: the fields that the newest event of a page must have according to the source."""


@dataclass
class SimulatedSources:
    """All sources of a test, and the settings with which the connectors' worker reads them."""

    sources: dict[str, SimulatedSource]
    ingest_folder: IngestFolder
    environment: dict[str, str]

    def expected(self) -> dict[str, dict[str, str]]:
        """Return the texts that each person must be shown, by person and key."""
        shown: dict[str, dict[str, str]] = {}
        for source in self.sources.values():
            shown.setdefault(source.person, {}).update(source.expected())
            shown.setdefault(source.play.outside, {})
        return shown

    async def clear(self) -> None:
        """Remove every document from its source, and forget it."""
        for source in self.sources.values():
            for page in source.pages.values():
                if page.alive:
                    await source.do("remove", page.name, "")
            source.pages.clear()

    def draw(self, rng: Random, names: list[str]) -> tuple[SimulatedSource, str, str]:
        """An source, an operation that is possible there, and the document's name."""
        source = rng.choice(list(self.sources.values()))
        operation, name = rng.choice(source.operations(names))
        return source, operation, name


@asynccontextmanager
async def simulated_sources(folder: Path) -> AsyncIterator[SimulatedSources]:
    """Create every source, empty, and serve it until the end."""
    async with AsyncExitStack() as opened:
        made: dict[str, SimulatedSource] = {}
        environment: dict[str, str] = {}
        tables: list[str] = []
        for source, kind in KINDS.items():
            playing = cast("Any", source_class(kind)).playground
            play = await opened.enter_async_context(playing())
            made[source] = SimulatedSource(source, play, _REVERSIBLE[kind](play))
            environment |= play.environment
            environment |= {f"PENSTOCK_{source.upper()}_{name}": secret for name, secret in play.environment.items()}
            tables.append(_table(source, kind, play.options))
        ingest_folder = IngestFolder(folder / "ingest_folder")
        ingest_folder.root.mkdir()
        made[INGESTED] = SimulatedSource(INGESTED, ingest_folder, ingest_folder)
        file = folder / "connectors.toml"
        file.write_text("\n".join(tables))
        yield SimulatedSources(made, ingest_folder, {**environment, "PENSTOCK_CONNECTORS_FILE": str(file)})


def _table(source: str, kind: str, options: Mapping[str, Any]) -> str:
    lines = [f"[connector.{source}]", f'kind = "{kind}"', f'tenant = "{TENANT}"']
    lines += [
        f"poll_seconds = {POLL_SECONDS}",
        f"sweep_seconds = {SWEEP_SECONDS}",
        f"groups_seconds = {GROUPS_SECONDS}",
    ]
    return "\n".join([*lines, *(f"{name} = {_value(value)}" for name, value in options.items())]) + "\n"


def _value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_value(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value)
