"""What frequent work costs with a large ledger beside a small one: it must not grow with what is there.

    python -m bench.scale [--sizes 10000 1000000] [--json FILE]

Fills a database and an index of its own on the running local stack for each size: documents of one chunk, a tenth as
many groups, as many memberships as documents, and a row of a connector for each document, nearly all of it by SQL. Then
times each step that the product does often, and prints the table of docs/performance.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from elasticsearch import AsyncElasticsearch

from pipeline.core.identifiers import terms
from pipeline.core.identity import EVERYONE, chunk_ids, document_id
from pipeline.core.model import Generation
from pipeline.stores.postgres import Connection

TENANT, SOURCE = "acme", "wiki"
ACCESS_SETS = 1_000
BULK_ENTRIES = 2_000


def text_of(n: int, characters: int) -> str:
    filler = f"Paragraph of document {n} about topic {n % 977} and place {n % 331}. "
    return (filler * (characters // len(filler) + 1))[:characters].rstrip()


def ids(documents: int, characters: int) -> Iterator[tuple[int, UUID, UUID, str]]:
    """Number, id, id of the only chunk, text."""
    for n in range(1, documents + 1):
        id_, text = document_id(TENANT, SOURCE, f"{n}.md"), text_of(n, characters)
        yield n, id_, chunk_ids(id_, [text])[0], text


_LEDGER = f"""
    INSERT INTO access_sets (tenant, digest, acl_tags, required_tags)
        SELECT '{TENANT}', sha256(n::text::bytea), ARRAY['{SOURCE}/team-' || n], '{{{{}}}}'
        FROM generate_series(0, {ACCESS_SETS} - 1) n;
    INSERT INTO documents (id, tenant, source, external_id, seq, announced_seq, version, observed_at,
            access_observed_at, access_id, content_hash, meta_hash, title, media_type)
        SELECT s.id, '{TENANT}', '{SOURCE}', n || '.md', n, n, 1, now() - interval '1 day', now() - interval '1 day',
            (SELECT min(id) FROM access_sets) + n % {ACCESS_SETS}, sha256(text::bytea), '', 'Title ' || n, 'text/plain'
        FROM staged s;
    INSERT INTO document_bodies SELECT id, text, '{{{{}}}}' FROM staged;
    INSERT INTO manifests
        SELECT id, '{{generation}}', sha256(text::bytea), ARRAY[chunk], ARRAY[30],
            jsonb_build_array(jsonb_build_array(jsonb_build_array(0, length(text)))), '[[]]'
        FROM staged;
    INSERT INTO index_state (document_id, generation, store, want_seq, seq, settled_at, settled_xid, claimed, confirmed,
            confirmed_hashes)
        SELECT id, '{{generation}}', store, n, n, now(), pg_current_xact_id(),
            CASE store WHEN 'keywords' THEN ARRAY[chunk] ELSE '{{{{}}}}' END,
            CASE store WHEN 'keywords' THEN ARRAY[chunk] ELSE '{{{{}}}}' END,
            CASE store WHEN 'keywords' THEN ARRAY[n::bigint] ELSE '{{{{}}}}' END
        FROM staged, unnest(ARRAY['vectors', 'keywords']) store;
    INSERT INTO {{table}} (id, document_id, access_id, text, embedding)
        SELECT chunk, id, (SELECT min(id) FROM access_sets) + n % {ACCESS_SETS}, text,
            ARRAY(SELECT random()::real - 0.5 + n * 0 FROM generate_series(1, {{dimensions}}))::real[]::{{vector}}
        FROM staged;
"""


async def fill_ledger(connection: Connection, generation: Generation, documents: int, characters: int) -> None:
    """The ledger and the vectors of so many settled documents."""
    await connection.execute("SET statement_timeout = 0")
    await connection.execute("CREATE TEMP TABLE staged (n bigint, id uuid, chunk uuid, text text)")
    async with connection.cursor().copy("COPY staged FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(["int8", "uuid", "uuid", "text"])
        for row in ids(documents, characters):
            await copy.write_row(row)
    statement = _LEDGER.format(
        generation=generation.name, table=generation.chunk_table, dimensions=generation.dimensions,
        vector=generation.vector_type,
    )  # fmt: skip
    await connection.execute(statement.encode())
    await connection.commit()


def entry(n: int, id_: UUID, text: str) -> dict[str, Any]:
    """The keyword entry of a document's chunk, as the sink would write it."""
    title = f"Title {n}"
    return {
        "document_id": str(id_), "tenant": TENANT, "source": SOURCE, "external_id": f"{n}.md", "title": title,
        "acl_tags": [f"{SOURCE}/team-{n % ACCESS_SETS}"], "required_tags": [EVERYONE], "required_count": 1,
        "source_url": None, "author": None, "media_type": "text/plain", "source_modified_at": None, "metadata": {},
        "text": text, "headings": [], "identifiers": terms(f"{title}\n{text}"),
    }  # fmt: skip


async def fill_keywords(es: AsyncElasticsearch, index: str, documents: int, characters: int) -> None:
    operations: list[bytes] = []
    for n, id_, chunk, text in ids(documents, characters):
        action = {"index": {"_index": index, "_id": str(chunk), "version": n, "version_type": "external_gte"}}
        operations += [json.dumps(action).encode(), json.dumps(entry(n, id_, text)).encode()]
        if len(operations) >= 2 * BULK_ENTRIES or n == documents:
            answer = await es.bulk(operations=operations)  # type: ignore[arg-type]  # bytes go as is
            assert not answer["errors"]
            operations = []
    await es.indices.refresh(index=index)
