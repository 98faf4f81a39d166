"""Runs the query service for load measurements: a separate process behind HTTP, with an API key for each share of
readable documents, and word vectors instead of a model."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import structlog

from bench.load_corpus import Corpus, WordVectors
from bench.load_library import TENANT
from bench.load_runs import SHARES, key, tag
from cli.main import ONE_THREAD
from pipeline.runtime.settings import load as load_settings
from query.embedding.embedders import QueryEmbedder
from query.http.serve import serving
from query.settings import load as load_query


@asynccontextmanager
async def served(
    folder: Path, dimensions: int, more: Mapping[str, str], *, model: str = WordVectors.model
) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Run the service in a separate process. Yields its address and the process.

    folder: a PENSTOCK_HOME that uses the library. model: the name of its generation's. more: further settings; a file
    of keys in them replaces the default one. The result cache is off and the limits of a caller are lifted; concurrency
    and queue have their defaults."""
    ends = (datetime.now(UTC) + timedelta(days=7)).date()
    keys = (
        []
        if "PENSTOCK_AUTH_KEYS_FILE" in more
        else [
            f'["{tag(share)}"]\nexpires = {ends}\n'
            f'sha256 = "{hashlib.sha256(key(share).encode()).hexdigest()}"\ntenant = "{TENANT}"\n'
            f'tags = ["wiki/{tag(share)}"]\n'
            for share in SHARES
        ]
    )
    if keys:
        (folder / "keys.toml").write_text("\n".join(keys))
    environment = {
        **ONE_THREAD,
        **os.environ,
        "PENSTOCK_HOME": str(folder),
        "PENSTOCK_SERVE_PORT": "0",
        "PENSTOCK_AUTH_KEYS_FILE": str(folder / "keys.toml"),
        "PENSTOCK_SERVE_REQUESTS_PER_MINUTE": "1000000000",
        "PENSTOCK_SERVE_CONCURRENT_PER_CALLER": "1000000",
        "PENSTOCK_QUERY_CACHED_QUERIES": "0",
        **more,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.load_service",
        str(dimensions),
        model,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        if not address:
            raise SystemExit("the service did not start: see its output above")
        yield address, psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def serve(dimensions: int, model: str) -> None:
    vectors = WordVectors(dimensions, Corpus())
    vectors.model = model
    async with serving(load_settings(), load_query(), embedders=QueryEmbedder(lambda: vectors)) as (address, _):
        print(address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
