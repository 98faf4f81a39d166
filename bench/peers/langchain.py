"""LangChain: ``index()`` with a record manager in Postgres, and PGVector; cleanup "full" (deletes are found)."""

from __future__ import annotations

from langchain_classic.indexes import SQLRecordManager, index
from langchain_core.documents import Document
from langchain_openai import OpenAIEmbeddings
from langchain_postgres import PGVector
from langchain_text_splitters import RecursiveCharacterTextSplitter

from bench.peers.protocol import BATCH, CHUNK_TOKENS, DIMENSIONS, MODEL, OVERLAP_TOKENS, Driver, Rows, read_task, serve


def main() -> None:
    task = read_task()
    dsn = task.dsn.replace("postgresql://", "postgresql+psycopg://")
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=task.embedding, api_key="none", chunk_size=BATCH, check_embedding_ctx_length=False
    )
    store = PGVector(embeddings, connection=dsn, collection_name="chunks", embedding_length=DIMENSIONS, use_jsonb=True)
    records = SQLRecordManager("pgvector/chunks", db_url=dsn)
    records.create_schema()
    splitter = RecursiveCharacterTextSplitter.from_tiktoken_encoder(
        encoding_name="cl100k_base", chunk_size=CHUNK_TOKENS, chunk_overlap=OVERLAP_TOKENS
    )

    def run(*, force: bool = False) -> None:
        documents = [Document(d.text, metadata={"source": d.name, "access": d.access}) for d in task.documents()]
        index(
            splitter.split_documents(documents),
            records,
            store,
            cleanup="full",
            source_id_key="source",
            batch_size=BATCH,
            key_encoder="sha256",
            force_update=force,
        )

    rows = Rows("langchain_pg_embedding", "cmetadata->>'source'", "document", "cmetadata->>'access'")
    serve(Driver(rows, run, ("langchain-core", "langchain-postgres"), repair=lambda: run(force=True)))


if __name__ == "__main__":
    main()
