"""CocoIndex: a folder, its recursive splitter, its LiteLLM embedder (which remembers by text), a table of Postgres."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import asyncpg
import cocoindex as coco
from cocoindex.connectors import localfs, postgres
from cocoindex.ops.litellm import LiteLLMEmbedder
from cocoindex.ops.text import RecursiveSplitter
from cocoindex.resources.chunk import Chunk
from cocoindex.resources.file import FileLike, PatternFilePathMatcher
from cocoindex.resources.id import IdGenerator
from numpy.typing import NDArray

from bench.peers.protocol import (
    CHARACTERS_A_TOKEN,
    CHUNK_TOKENS,
    MODEL,
    OVERLAP_TOKENS,
    Driver,
    Rows,
    read_task,
    serve,
)

DATABASE = coco.ContextKey[asyncpg.Pool]("database")
EMBEDDER = coco.ContextKey[LiteLLMEmbedder]("embedder", detect_change=True)
splitter = RecursiveSplitter()
task = read_task()


@coco.lifespan
async def lifespan(builder: coco.EnvironmentBuilder) -> AsyncIterator[None]:
    builder.settings.db_path = task.state / "cocoindex"
    async with await postgres.create_pool(task.dsn) as pool:
        builder.provide(DATABASE, pool)
        builder.provide(EMBEDDER, LiteLLMEmbedder(f"openai/{MODEL}", api_base=task.embedding, api_key="none"))
        yield


@dataclass
class Row:
    id: int
    name: str
    text: str
    access: str
    embedding: Annotated[NDArray, EMBEDDER]


@coco.fn
async def chunk_row(chunk: Chunk, name: str, access: str, ids: IdGenerator, table: postgres.TableTarget[Row]) -> None:
    embedding = await coco.use_context(EMBEDDER).embed(chunk.text)
    table.declare_row(row=Row(await ids.next_id(chunk.text), name, chunk.text, access, embedding))


@coco.fn(memo=True)
async def file_rows(item: tuple[FileLike, str, str], table: postgres.TableTarget[Row]) -> None:
    file, name, access = item
    chunks = splitter.split(
        await file.read_text(),
        chunk_size=round(CHUNK_TOKENS * CHARACTERS_A_TOKEN),
        chunk_overlap=round(OVERLAP_TOKENS * CHARACTERS_A_TOKEN),
        language="markdown",
    )
    await coco.map(chunk_row, chunks, name, access, IdGenerator(), table)


@coco.fn
async def whole(folder: Path) -> None:
    table = await postgres.mount_table_target(
        DATABASE, table_name="chunks", table_schema=await postgres.TableSchema.from_class(Row, primary_key=["id"])
    )
    files = localfs.walk_dir(folder, recursive=True, path_matcher=PatternFilePathMatcher(included_patterns=["**/*.md"]))
    access = json.loads(folder.with_name("access.json").read_text())

    async def items() -> AsyncIterator[tuple[str, tuple[FileLike, str, str]]]:
        async for name, file in files.items():
            yield name, (file, name, access[name])

    await coco.mount_each(file_rows, items(), table)


def main() -> None:
    app = coco.App(coco.AppConfig(name="chunks"), whole, folder=task.library)
    rows = Rows("chunks", "name", "text", "access")
    serve(Driver(rows, lambda: run(app), ("cocoindex", "litellm"), repair=lambda: run(app, again=True)))


def run(app: coco.App, *, again: bool = False) -> None:
    app.update_blocking(full_reprocess=again)


if __name__ == "__main__":
    main()
