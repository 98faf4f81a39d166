"""The fake embeddings server is honest: it keeps OpenAI's published limits, and works as a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.fakes.openai import FakeOpenAI


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(dimensions=8) as fake:
        yield fake


async def ask(fake: FakeOpenAI, texts: Any, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{fake.url}/embeddings", json={"model": fake.model, "input": texts, **more})


@pytest.mark.parametrize(
    ("texts", "more"),
    [
        ([], {}),
        ("", {}),
        (["fine", ""], {}),
        (["a"] * 2_049, {}),
        ("word" + " word" * 8_192, {}),
        (["word" + " word" * 7_999] * 38, {}),
        (["a"], {"dimensions": 9}),
        (["a"], {"dimensions": 0}),
        (["a"], {"encoding_format": "int8"}),
    ],
    ids=["none", "empty", "one-empty", "too-many", "too-long", "too-many-tokens", "wide", "no-width", "format"],
)
async def test_the_fake_server_rejects_what_openai_rejects(fake: FakeOpenAI, texts: Any, more: dict[str, Any]) -> None:
    response = await ask(fake, texts, **more)
    assert response.status_code == 400
    assert response.json()["error"]["type"]
    assert (fake.stats.requests, fake.stats.inputs) == (1, 0)


@pytest.mark.parametrize("texts", ["a", ["a"] * 2_048, "word" + " word" * 8_191, ["word" + " word" * 7_999] * 37])
async def test_the_fake_server_accepts_what_openai_accepts(fake: FakeOpenAI, texts: Any) -> None:
    assert (await ask(fake, texts)).status_code == 200


async def test_the_fake_server_shortens_a_vector_to_fewer_dimensions(fake: FakeOpenAI) -> None:
    whole, short = fake.vector("text"), fake.vector("text", 3)
    np.testing.assert_allclose(short, whole[:3] / np.linalg.norm(whole[:3]), atol=1e-6)
    served = (await ask(fake, "text", dimensions=3)).json()["data"][0]["embedding"]
    np.testing.assert_allclose(served, short, atol=1e-6)


async def test_the_fake_server_runs_as_a_process_whose_faults_and_stats_are_controlled_over_http() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.fakes.openai", "--dimensions", "4", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = json.loads(await process.stdout.readline())["url"]
    control = url.removesuffix("/v1")
    body = {"model": "text-embedding-3-large", "input": ["one", "two"]}
    async with httpx.AsyncClient() as client:
        assert (await client.post(f"{control}/_faults", json={"throttle": 1})).json()["throttle"] == 1
        assert (await client.post(f"{control}/_faults", json={"thrttle": 1})).status_code == 400
        statuses = [(await client.post(f"{url}/embeddings", json=body)).status_code for _ in range(2)]
        stats = (await client.get(f"{control}/_stats")).json()
        assert statuses == [429, 200]
        assert (stats["requests"], stats["inputs"], stats["statuses"]) == (2, 2, {"429": 1, "200": 1})
        await client.post(f"{control}/_reset")
        assert (await client.get(f"{control}/_stats")).json()["requests"] == 0
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 0
