"""The query service as load is measured on it: a process of its own behind HTTP, with an API key for each share of the
documents that may be read, and word vectors in place of a model.
"""

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
from pipeline.runtime.settings import load as load_settings
from query.embedding.embedders import QueryEmbedder
from query.http.serve import serving
from query.settings import load as load_query


@asynccontextmanager
async def served(folder: Path, dimensions: int, more: Mapping[str, str]) -> AsyncIterator[tuple[str, psutil.Process]]:
    """The service as a process of its own; yields its address and the process.

    folder: the PENSTOCK_HOME that leads to the library. more: settings besides; a file of keys among them stands in
    for ours. Its result cache is off, the limits of one caller are lifted; the places for work and the waiting room are
    the defaults."""
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
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        if not address:
            raise SystemExit("the service did not start: what it says stands above")
        yield address, psutil.Process(process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def serve(dimensions: int) -> None:
    vectors = WordVectors(dimensions, Corpus())
    async with serving(load_settings(), load_query(), embedders=QueryEmbedder(lambda: vectors)) as (address, _):
        print(address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(serve(int(sys.argv[1])))
