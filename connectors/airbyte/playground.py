"""A program for the laws of connectors: its service is a file."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from connectors.airbyte.options import CDC_DELETED
from connectors.airbyte.source import Airbyte
from connectors.conform.samples import DeclaredMembers
from connectors.fakes import airbyte
from connectors.fakes.misbehaviour import Fault
from connectors.source import Playground

TOKEN = "opens-nothing-else"  # noqa: S105
STREAM = "notes"
CONFIG_VARIABLE = "AIRBYTE_CONFIG"


class MisbehavingProgram:
    """Lets the program show the faults of the catalogue, as ``connectors.fakes.misbehaviour.Misbehaving`` does."""

    def __init__(self, service: Path) -> None:
        self._service = service
        self.faults: Mapping[str, Any] = {}
        """The faults that are shown with ``read``."""

    @property
    def shown(self) -> int:
        """The number of runs that showed faults since the last call of ``show``."""
        return int(json.loads(self._service.read_text("utf-8")).get("shown", 0))

    def show(self, faults: Sequence[Fault], ids: Mapping[str, str]) -> None:
        """Show these faults from now on, instead of those before."""
        shown: dict[str, Any] = {}
        for fault in faults:
            shown |= fault.program
            if fault.times is not None:
                shown["times"] = fault.times
        content = json.loads(self._service.read_text("utf-8"))
        write_service(self._service, {**content, "faults": shown, "shown": 0})


def write_service(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file of the service."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), "utf-8")
    partial.replace(path)


class ProgramPlayground(DeclaredMembers):
    """A service with one stream. A removed record is absent, or, for programs that follow changes, marked."""

    def __init__(self, folder: Path, sync: str) -> None:
        super().__init__(folder / "members.toml")
        self._marks = sync == "incremental"
        self._service = folder / "service.json"
        self.misbehaving = MisbehavingProgram(self._service)
        self._records: dict[str, dict[str, Any]] = {}
        self._removed: dict[str, dict[str, Any]] = {}
        self._revision = self._lineage = 0
        self._save()
        stream = {
            "title": "{title}",
            "text": "{title}\n\n{body}",
            "acl": ["team.name"],
            "metadata": ["team.name", "label"],
            "sync": sync,
        }
        self.environment: Mapping[str, str] = {
            CONFIG_VARIABLE: json.dumps({"data": str(self._service), "token": TOKEN}),
        }
        self.options: Mapping[str, Any] = {
            "program": [sys.executable, airbyte.__file__],
            "members_file": str(self.members_file),
            "config": {"env": CONFIG_VARIABLE},
            "streams": {STREAM: stream},
        }

    async def write(self, name: str, text: str) -> str:
        self._put(name, {"team": {"name": "team"}, **self._records.get(name, {}), "title": name.title(), "body": text})
        return f"{STREAM}/{name}"

    async def move(self, name: str) -> None:
        """Rename it."""
        self._put(name, {**self._records[name], "title": f"{name.title()}, renamed"})

    async def relabel(self, name: str) -> None:
        self._put(name, {**self._records[name], "label": "policy"})

    async def remove(self, name: str) -> None:
        self._removed[name] = removed = self._records.pop(name)
        if self._marks:
            self._put(name, {"team": removed["team"], CDC_DELETED: "2026-11-21T08:30:00Z"})
        else:
            self._save()

    async def restore(self, name: str) -> None:
        self._put(name, self._removed.pop(name))

    async def restrict(self, name: str) -> None:
        self._put(name, {**self._records[name], "team": {"name": "board"}})

    async def add_places(self) -> Mapping[str, str]:
        """Add nothing: the entries concern the program."""
        return {}

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """throttled: the program itself waits, and says so in its log. truncated: it ends in the middle. expired: the
        service knows no state any more, and the program reads everything."""
        self._lineage += expired
        self._save(throttled=throttled, failing=failing, **({"dies_after": 3} if truncated else {}))

    def _put(self, name: str, record: Mapping[str, Any]) -> None:
        self._revision += 1
        self._records[name] = {**record, "id": name, "changed": self._revision}
        self._save()

    def _save(self, **faults: Any) -> None:
        """Write the service's file. Faults that are counted remain."""
        shown = 0
        if not faults and self._service.exists():
            content = json.loads(self._service.read_text("utf-8"))
            faults, shown = content["faults"], content.get("shown", 0)
        content = {
            "records": {STREAM: list(self._records.values())},
            "lineage": self._lineage,
            "token": TOKEN,
            "faults": faults,
            "shown": shown,
        }
        write_service(self._service, content)


@asynccontextmanager
async def playing(sync: str = "full_refresh") -> AsyncIterator[Playground]:
    with tempfile.TemporaryDirectory(prefix="penstock-airbyte-") as folder:
        yield ProgramPlayground(Path(folder), sync)


class ChangesStream(Airbyte):
    """The source on a stream that is read incrementally, and marks what was deleted."""

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        return playing("incremental")
