"""pgai's vectorizer: documents are rows of a table, its worker runs once after each change, in this process.

What an application does is done here: changed rows are written, unchanged ones are not, rows of deleted files go.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pgai
import psycopg
from pgai.vectorizer import CreateVectorizer, Worker
from pgai.vectorizer.configuration import (
    ChunkingRecursiveCharacterTextSplitterConfig,
    DestinationTableConfig,
    EmbeddingOpenaiConfig,
    FormattingPythonTemplateConfig,
    IndexingNoneConfig,
    LoadingColumnConfig,
    SchedulingNoneConfig,
)

from bench.peers.protocol import (
    CHARACTERS_A_TOKEN,
    CHUNK_TOKENS,
    DIMENSIONS,
    MODEL,
    OVERLAP_TOKENS,
    Driver,
    Rows,
    Task,
    read_task,
    serve,
)

TABLE = "CREATE TABLE documents (name text PRIMARY KEY, content text NOT NULL, access text NOT NULL)"
UPSERT = """
INSERT INTO documents (name, content, access) VALUES (%s, %s, %s)
ON CONFLICT (name) DO UPDATE SET content = EXCLUDED.content, access = EXCLUDED.access
WHERE (documents.content, documents.access) IS DISTINCT FROM (EXCLUDED.content, EXCLUDED.access)
"""


def main() -> None:
    task = read_task()
    pgai.install(task.dsn)
    vectorizer = CreateVectorizer(
        source="documents",
        name="chunks",
        destination=DestinationTableConfig(target_table="chunks_store", view_name="chunks"),
        loading=LoadingColumnConfig(column_name="content"),
        embedding=EmbeddingOpenaiConfig(model=MODEL, dimensions=DIMENSIONS, base_url=task.embedding),
        chunking=ChunkingRecursiveCharacterTextSplitterConfig(
            chunk_size=round(CHUNK_TOKENS * CHARACTERS_A_TOKEN),
            chunk_overlap=round(OVERLAP_TOKENS * CHARACTERS_A_TOKEN),
        ),
        formatting=FormattingPythonTemplateConfig(template="$chunk"),
        indexing=IndexingNoneConfig(),
        scheduling=SchedulingNoneConfig(),
    )
    with psycopg.connect(task.dsn, autocommit=True) as connection:
        connection.execute(TABLE)
        connection.execute(vectorizer.to_sql().encode())
    rows = Rows("chunks", "name", "chunk", "access", stored="chunks_store")
    serve(Driver(rows, lambda: run(task), ("pgai",)))


def run(task: Task) -> None:
    documents = task.documents()
    with psycopg.connect(task.dsn) as connection, connection.cursor() as cursor:
        cursor.executemany(UPSERT, [(d.name, d.text, d.access) for d in documents])
        cursor.execute("DELETE FROM documents WHERE name <> ALL (%s)", [[d.name for d in documents]])
    worker = Worker(task.dsn, poll_interval=timedelta(seconds=1), once=True)
    if (error := asyncio.run(worker.run())) is not None:
        raise error


if __name__ == "__main__":
    main()
