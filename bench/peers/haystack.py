"""Driver of Haystack: the documented indexing pipeline (splitter, embedder, writer with OVERWRITE) into
PgvectorDocumentStore.

It keeps no record of indexed documents: each run embeds all of them, and deleted ones stay. Splitting by tokens needs a
vocabulary that it would download (o200k), so the splitter counts words, as many as 400 tokens have.
"""

from __future__ import annotations

from haystack import Document, Pipeline
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.components.preprocessors import DocumentSplitter
from haystack.components.writers import DocumentWriter
from haystack.document_stores.types import DuplicatePolicy
from haystack.utils import Secret
from haystack_integrations.document_stores.pgvector import PgvectorDocumentStore

from bench.peers.protocol import (
    BATCH,
    CHUNK_TOKENS,
    DIMENSIONS,
    MODEL,
    OVERLAP_TOKENS,
    TOKENS_A_WORD,
    Driver,
    Rows,
    read_task,
    serve,
)


def main() -> None:
    task = read_task()
    store = PgvectorDocumentStore(
        connection_string=Secret.from_token(task.dsn), table_name="chunks", embedding_dimension=DIMENSIONS
    )
    splitter = DocumentSplitter(
        split_by="word",
        split_length=round(CHUNK_TOKENS / TOKENS_A_WORD),
        split_overlap=round(OVERLAP_TOKENS / TOKENS_A_WORD),
    )
    embedder = OpenAIDocumentEmbedder(
        api_key=Secret.from_token("none"),
        api_base_url=task.embedding,
        model=MODEL,
        batch_size=BATCH,
        progress_bar=False,
        raise_on_failure=True,
    )
    pipeline = Pipeline()
    pipeline.add_component("splitter", splitter)
    pipeline.add_component("embedder", embedder)
    pipeline.add_component("writer", DocumentWriter(store, policy=DuplicatePolicy.OVERWRITE))
    pipeline.connect("splitter", "embedder")
    pipeline.connect("embedder", "writer")
    store.count_documents()  # makes the table

    def run() -> None:
        documents = [Document(content=d.text, meta={"source": d.name, "access": d.access}) for d in task.documents()]
        pipeline.run({"splitter": {"documents": documents}})

    rows = Rows("chunks", "meta->>'source'", "content", "meta->>'access'")
    serve(Driver(rows, run, ("haystack-ai", "pgvector-haystack")))


if __name__ == "__main__":
    main()
