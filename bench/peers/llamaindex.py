"""LlamaIndex: IngestionPipeline with a document store (upserts and deletes) into PGVectorStore.

The document store is the documented one (in memory, persisted to a folder after each run). Its cache of whole runs is
off: it never hits when a document changes, and holds every vector in memory.
"""

from __future__ import annotations

from pathlib import Path

from llama_index.core import Document
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.vector_stores.postgres import PGVectorStore

from bench.peers.protocol import BATCH, CHUNK_TOKENS, DIMENSIONS, MODEL, OVERLAP_TOKENS, Driver, Rows, read_task, serve


def main() -> None:
    task = read_task()
    store = PGVectorStore.from_params(
        connection_string=task.dsn.replace("postgresql://", "postgresql+psycopg2://"),
        async_connection_string=task.dsn.replace("postgresql://", "postgresql+asyncpg://"),
        table_name="chunks",
        embed_dim=DIMENSIONS,
        use_jsonb=True,
    )
    pipeline = IngestionPipeline(
        transformations=[
            SentenceSplitter(chunk_size=CHUNK_TOKENS, chunk_overlap=OVERLAP_TOKENS),
            OpenAIEmbedding(model=MODEL, api_base=task.embedding, api_key="none", embed_batch_size=BATCH),
        ],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        disable_cache=True,
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )

    def run() -> None:
        pipeline.run(documents=[document(d.name, d.text, d.access) for d in task.documents()])
        pipeline.persist(str(Path(task.state) / "pipeline"))

    def document(name: str, text: str, access: str) -> Document:
        metadata = {"source": name, "access": access}
        unseen = list(metadata)  # neither embedded nor counted as part of a chunk
        return Document(
            id_=name,
            text=text,
            metadata=metadata,
            excluded_embed_metadata_keys=unseen,
            excluded_llm_metadata_keys=unseen,
        )

    rows = Rows("data_chunks", "metadata_->>'source'", "text", "metadata_->>'access'")
    serve(Driver(rows, run, ("llama-index-core", "llama-index-vector-stores-postgres")))


if __name__ == "__main__":
    main()
