"""The next version is brought in process by process while documents change, and taken back again: nothing is lost, no
worker refuses, no search fails."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from pipeline.runtime.home import DEVELOPMENT_FILE
from pipeline.runtime.settings import dist
from tests.support.deploy.wheels import Installed, install, next_version
from tests.support.pipeline.oracle import assert_equal
from tests.support.query.http_kit import bearer
from tests.support.space import Space, now
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE

pytestmark = [pytest.mark.stack, pytest.mark.slow]

FLEET = ("detect", "detect#2", "vectors", "keywords")
"""Two of detect: while they are exchanged both versions share a consumer group."""


class NextUpserted(DocumentUpserted):
    """As the next version's connectors publish it."""

    next_tier: str = "gold"


class Changes:
    """Edits, deletions, revocations and new documents, one after another, and what must be there in the end."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._random = random.Random(7)
        self._stopped = asyncio.Event()
        self.expected: dict[str, DocumentUpserted] = {}
        self.last: dict[str, DocumentUpserted | DocumentDeleted | AccessChanged] = {}
        self.sent = 0

    async def run(self) -> None:
        while not self._stopped.is_set():
            await self.one()
            await asyncio.sleep(0.1)

    def stop(self) -> None:
        self._stopped.set()

    async def one(self) -> None:
        self.sent += 1
        name = f"page-{self._random.randrange(40)}.md"
        known, kind = self.expected.get(name), self._random.random()
        base = {"tenant": "acme", "source": "wiki", "external_id": name, "observed_at": now()}
        message: DocumentUpserted | DocumentDeleted | AccessChanged
        if known is not None and kind < 0.1:
            del self.expected[name]
            message = DocumentDeleted(version=known.version, **base)
        elif known is not None and kind < 0.3:
            tags = ["board"] if known.acl_tags == ("staff",) or list(known.acl_tags) == ["staff"] else ["staff"]
            message = AccessChanged(acl_tags=tags, **base)
            self.expected[name] = known.model_copy(update={"acl_tags": tags})
        else:
            message = self._upserted(base)
            self.expected[name] = message
        self.last[name] = message
        topic = DOCUMENTS_BACKFILL if isinstance(message, DocumentUpserted) and kind > 0.8 else DOCUMENTS_LIVE
        await self._space.publish(message, topic=topic)

    def _upserted(self, base: dict[str, object]) -> DocumentUpserted:
        message = NextUpserted if self.sent % 2 else DocumentUpserted
        text = f"# Change {self.sent}\n\nThe heron of change {self.sent} waits.\n\n# Kept\n\nThis stays as it was.\n"
        return message(
            version=time.time_ns(),
            title=str(base["external_id"]),
            content=text,
            media_type="text/markdown",
            acl_tags=["staff"],
            **base,
        )


@asynccontextmanager
async def serving(space: Space, version: Installed) -> AsyncIterator[httpx.AsyncClient]:
    with (space.home / f"serve-{version.version}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            version.penstock,
            "serve",
            "--port",
            "0",
            cwd=space.home,
            env=environment(space),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()[-1]
        headers = bearer(space.home / DEVELOPMENT_FILE)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


def environment(space: Space) -> dict[str, str]:
    return {**space.environment, "PENSTOCK_DIST": str(dist()), "PENSTOCK_SERVE_DEVELOPMENT": "true"}


async def search(client: httpx.AsyncClient, stopped: asyncio.Event) -> int:
    """Until stopped; returns how many searches were answered. None may fail; a busy machine may ask us to wait."""
    answered = refused = 0
    while not stopped.is_set():
        response = await client.post("/v1/search", json={"query": f"heron of change {answered}"})
        if response.status_code == 503 and refused < 20:
            assert response.headers["retry-after"]
            refused += 1
        else:
            assert response.status_code == 200, response.text
            answered, refused = answered + 1, 0
        await asyncio.sleep(0.6)  # 120 a minute are taken
    return answered


def migrate(space: Space, version: Installed) -> str:
    done = subprocess.run(
        [version.penstock, "migrate"],
        env=environment(space),
        cwd=space.home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(space: Space, version: Installed, *names: str) -> None:
    space.start(
        *names, python=str(version.python), program=("-P", "-m", "cli.main"), env={"PENSTOCK_DIST": str(dist())}
    )


async def roll(space: Space, version: Installed) -> None:
    """Worker by worker: each drains and ends well, then its successor starts."""
    for name in FLEET:
        assert await asyncio.to_thread(space.stop, name, 40) == 0, f"{name} did not end in good order"
        await asyncio.to_thread(start, space, version, name)


@pytest.mark.timeout(600)
async def test_a_rolling_upgrade_and_downgrade_lose_no_change_and_fail_no_search(space: Space, tmp_path: Path) -> None:
    now_, next_ = await asyncio.gather(
        asyncio.to_thread(install, tmp_path / "now"), asyncio.to_thread(install, tmp_path / "next", next_version)
    )
    assert now_.version != next_.version
    await asyncio.to_thread(start, space, now_, *FLEET)
    changes, stopped = Changes(space), asyncio.Event()
    publishing = asyncio.create_task(changes.run())
    async with serving(space, now_) as old, asyncio.TaskGroup() as searching:
        searches = [searching.create_task(search(old, stopped))]
        assert "migration 9000_next" in (await asyncio.to_thread(migrate, space, next_)).splitlines()
        await roll(space, next_)
        async with serving(space, next_) as new:
            searches.append(searching.create_task(search(new, stopped)))
            before = changes.sent
            await roll(space, now_)  # and back: the schema stays
            assert await asyncio.to_thread(migrate, space, now_) == "Everything is up to date.\n"
            changes.stop()
            await publishing
            assert changes.sent > before > 20, "documents changed all along"
            await space.settled(changes.last.values())
            stopped.set()
            assert all([await search for search in searches])
    await assert_equal(space, changes.expected.values())
    assert await space.query("SELECT code FROM dead_letters") == []
    code, report = await space.penstock("audit", "--json")
    assert (code, report["clean"]) == (0, True), report["differences"][:3]
    for name in FLEET:
        assert "Traceback" not in space.log(name)
        assert '"exception"' not in space.log(name)
