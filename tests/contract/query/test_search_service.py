"""``penstock search`` asks the running query service where it can, and answers by itself where it cannot."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.local.stack import Stack
from pipeline.runtime.home import DEVELOPMENT_FILE
from tests.support.processes import run_penstock
from tests.support.query.http_kit import service_over
from tests.support.query.library import Library, WordEmbedder, document


async def search(home: Path, *arguments: str, **more: str) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "OTEL_"))}
    dist = {name: os.environ[name] for name in ("PENSTOCK_DIST",) if name in os.environ}
    env = {**kept, **dist, "PENSTOCK_HOME": str(home), **more}
    run = partial(run_penstock, "search", "kestrels", "--mode", "keyword", "--json", *arguments, env=env)
    done = await asyncio.to_thread(run)
    assert done.returncode == 0, done.stderr
    response: dict[str, Any] = json.loads(done.stdout)
    return response


def external_ids(response: dict[str, Any]) -> list[str]:
    return sorted(result["external_id"] for result in response["results"])


@pytest.mark.slow
async def test_penstock_search_gives_the_same_results_with_and_without_the_service(
    stack: Stack, tmp_path: Path
) -> None:
    me = getpass.getuser()
    async with Library.create(stack, WordEmbedder()) as library:
        await library.put(
            document("mine.md", "Kestrels nest on the mill.", tenant="default", acl_tags=[f"user:{me}"]),
            document("zoë.md", "Kestrels hunt at dawn.", tenant="Größe", acl_tags=["user:zoë"], author="Zoë"),
            document("hers.md", "Kestrels moult in June.", tenant="Größe", acl_tags=["user:zoë"], author="Ann"),
        )
        library.write_home(tmp_path)
        async with service_over(library, serve={"development_token_file": tmp_path / DEVELOPMENT_FILE}) as (
            client,
            service,
        ):
            file = tmp_path / "endpoints.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "serve": {"url": str(client.base_url)}}))

            def answered() -> float:
                return service.metrics.requests.labels("/v1/search", "ok")._value.get()

            async def both(*arguments: str) -> list[str]:
                """Asked of the service; and, since something is set that may be set otherwise there, not of it."""
                before = answered()
                there = await search(tmp_path, *arguments)
                assert answered() == before + 1
                here = await search(tmp_path, *arguments, PENSTOCK_RERANK_POOL="50")
                assert answered() == before + 1
                assert there["results"] == here["results"]
                assert there.keys() == here.keys()
                return external_ids(there)

            assert await both() == ["mine.md"]
            assert await both("--tenant", "Größe", "--as", "zoë") == ["hers.md", "zoë.md"]
            narrow = ("--author", "Zoë", "--source", "wiki", "--type", "text/*", "--top", "3")
            assert await both("--tenant", "Größe", "--as", "zoë", *narrow) == ["zoë.md"]
            assert await both("--as", "zoë", "--since", "2d") == []

            responses = answered()
            for nobody in ("", " zoë", "zoë\t"):  # a header would make somebody else of them
                assert external_ids(await search(tmp_path, "--as", nobody)) == []
            assert external_ids(await search(tmp_path, "--tenant", "Größe", "--tag", "wiki/user:zoë")) == [
                "hers.md",
                "zoë.md",
            ]
            assert external_ids(await search(tmp_path, "--as", me, "--as", "zoë")) == ["mine.md"]
            assert answered() == responses
        assert external_ids(await search(tmp_path)) == ["mine.md"]  # it was stopped: nobody is left to ask
