"""The OpenAI fake as a process of its own, so that a test that waits for a worker does not keep the worker waiting."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent.parent


@dataclass
class EmbeddingServer:
    url: str
    """Base URL for a client."""

    async def stats(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._call, "/_stats", None)

    async def faults(self, **changes: object) -> None:
        """Set knobs of tests.fakes.openai.Faults."""
        await asyncio.to_thread(self._call, "/_faults", changes)

    async def inputs(self) -> int:
        """Texts embedded so far."""
        return int((await self.stats())["inputs"])

    def _call(self, path: str, body: object) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url.removesuffix("/v1") + path, data=data, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return dict(json.loads(answer.read()))


@asynccontextmanager
async def serving(*, dimensions: int = 64, latency_ms: float = 0) -> AsyncIterator[EmbeddingServer]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.openai", "--dimensions", str(dimensions), "--latency-ms", str(latency_ms)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 60)
        yield EmbeddingServer(json.loads(line)["url"])
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
