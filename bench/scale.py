"""Measures what frequent work costs with a large and with a small ledger: the cost must not grow with the size.

    python -m bench.scale [--sizes 10000 1000000] [--json FILE]

Fills a database and an index of its own on the running local stack for each size: documents of one short chunk, a tenth
as many groups of ten people (as many memberships as documents), as many access sets as groups, and a connector's row
for each document, by SQL (ids and entries are made here). Then each step that the product does often is timed on all of
them in turns, and the table of docs/performance.md is printed; ``python -m bench.curves`` puts it there from
bench/results/scale.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time
from typing import Any
from uuid import UUID

import numpy as np
import psutil
import structlog
from elasticsearch import AsyncElasticsearch

from bench.curves import scale_table
from bench.machine import description
from connectors.clock import Clock
from connectors.runner.identities import Identities
from connectors.runner.publish import Publisher
from connectors.runner.reconcile import PAGE as COMPARED
from connectors.runner.reconcile import DocumentComparison, LedgerComparison, Reconcile
from connectors.runner.rows import PAGE, Holder, Rows
from connectors.runner.state import State
from connectors.runner.sweep import Sweep
from connectors.set_aside import SetAside
from connectors.source import Group, Listed
from deploy.local.stack import Stack
from pipeline.audit.background import LIMITS, PROCESSOR_SHARE, BackgroundAudit
from pipeline.core.identity import EVERYONE, chunk_ids, document_id
from pipeline.core.model import Generation
from pipeline.embedding.port import Embedded, Vectors
from pipeline.ledger.entry import content_fields
from pipeline.runtime.settings import AuditSettings, home
from pipeline.stages.announce import Announcer
from pipeline.stages.hints import Sweeper
from pipeline.stores.postgres import Connection, permit_long
from query.evaluation.place import NoKafka
from tests.support.query.library import Library, WordEmbedder

TENANT, SOURCE = "acme", "wiki"
DOCUMENTS_A_GROUP = 10
CHARACTERS = 120
"""Length of a document's text."""
BULK_ENTRIES = 2_000
PENDING = 300
"""Documents that are pending in both stores, for the sweeper and the announcer."""
LISTED, CHANGED_GROUPS = 200, 20
"""Documents on a page of a listing, and groups in a batch of webhooks."""
WARM, TIMES = 3, 15
"""Turns that warm up, and turns that are measured."""


class FewDimensions(WordEmbedder):
    """An embedder whose vectors cost next to nothing, so that the rest is measured."""

    dimensions = 8

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        return Embedded(np.array([self._vector(text) for text in texts], dtype=np.float32))

    def _vector(self, text: str) -> Vectors:
        return super()._vector(text)[: self.dimensions]


def text_of(n: int, characters: int = CHARACTERS) -> str:
    filler = f"Paragraph of document {n} about topic {n % 977} and place {n % 331}. "
    return (filler * (characters // len(filler) + 1))[:characters].rstrip()


def ids(documents: int, characters: int = CHARACTERS) -> Iterator[tuple[int, UUID, UUID, str]]:
    """Yield each document's number, id, its only chunk's id, and its text."""
    for n in range(1, documents + 1):
        id_, text = document_id(TENANT, SOURCE, f"{n}.md"), text_of(n, characters)
        yield n, id_, chunk_ids(id_, [text])[0], text


_LEDGER = f"""
    INSERT INTO access_sets (id, tenant, digest, acl_tags, required_tags) OVERRIDING SYSTEM VALUE
        SELECT n + 1, '{TENANT}', sha256(n::text::bytea), ARRAY['{SOURCE}/team-' || n], '{{{{}}}}'
        FROM generate_series(0, {{groups}} - 1) n;
    INSERT INTO documents (id, tenant, source, external_id, seq, announced_seq, version, observed_at,
            access_observed_at, access_id, content_hash, meta_hash, title, media_type)
        SELECT s.id, '{TENANT}', '{SOURCE}', n || '.md', n, n, 1, now() - interval '1 day', now() - interval '1 day',
            n % {{groups}} + 1, sha256(text::bytea), '', 'Title ' || n, 'text/plain'
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
    INSERT INTO memberships (tenant, source, principal, groups, observed_at)
        SELECT '{TENANT}', '{SOURCE}', 'p' || p,
            ARRAY(SELECT 'team-' || (p + k) % {{groups}} FROM generate_series(0, 9) k), now()
        FROM generate_series(0, {{groups}} - 1) p;
    INSERT INTO connectors (tenant, source, kind, epoch) VALUES ('{TENANT}', '{SOURCE}', 'bench', 1);
    INSERT INTO connector_groups
        SELECT '{TENANT}', '{SOURCE}', 'team-' || n,
            ARRAY(SELECT 'p' || (n + {{groups}} - k) % {{groups}} FROM generate_series(0, 9) k), '{{{{}}}}', now()
        FROM generate_series(0, {{groups}} - 1) n;
    INSERT INTO connector_principals
        SELECT '{TENANT}', '{SOURCE}', 'p' || p, 'x', now() FROM generate_series(0, {{groups}} - 1) p;
    INSERT INTO connector_items (tenant, source, external_id, scope, version, fingerprint, revision, acl_tags,
            content_at, access_at)
        SELECT '{TENANT}', '{SOURCE}', n || '.md', '', 1, 'x', '1', ARRAY['team-' || n % {{groups}}],
            now() - interval '1 day', now() - interval '1 day'
        FROM staged;
    INSERT INTO {{table}} (id, document_id, access_id, text, embedding)
        SELECT chunk, id, n % {{groups}} + 1, text,
            ARRAY(SELECT random()::real - 0.5 + n * 0 FROM generate_series(1, {{dimensions}}))::real[]::{{vector}}
        FROM staged;
"""


async def fill_ledger(connection: Connection, generation: Generation, documents: int) -> None:
    """Fill the ledger and the vectors with settled documents."""
    await permit_long(connection)
    await connection.execute("SET statement_timeout = 0")
    # No graph: searches with narrow access do not use it, and each row would take a millisecond more.
    await connection.execute(f"DROP INDEX {generation.chunk_table}_hnsw".encode())
    await connection.execute("CREATE TEMP TABLE staged (n bigint, id uuid, chunk uuid, text text)")
    async with connection.cursor().copy("COPY staged FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(["int8", "uuid", "uuid", "text"])
        in_order = await asyncio.to_thread(lambda: sorted(ids(documents, CHARACTERS), key=lambda row: row[1]))
        for row in in_order:  # the order in which indexes grow fastest
            await copy.write_row(row)
    await connection.execute("SET LOCAL session_replication_role = replica")  # neither triggers nor foreign keys
    statement = _LEDGER.format(
        generation=generation.name,
        table=generation.chunk_table,
        dimensions=generation.dimensions,
        vector=generation.vector_type,
        groups=documents // DOCUMENTS_A_GROUP,
    )
    for command in statement.split(";\n"):
        if command.strip():
            await connection.execute(command.encode())
    await connection.execute(
        "UPDATE documents SET seq = seq + 1 WHERE id IN (SELECT id FROM staged ORDER BY id LIMIT %s)", [PENDING]
    )
    await connection.execute(
        "UPDATE index_state s SET want_seq = d.seq FROM documents d WHERE d.announced_seq < d.seq"
        " AND d.id = s.document_id"
    )
    await connection.execute("DROP TABLE staged")
    await connection.commit()
    await connection.execute("ANALYZE")
    await connection.commit()


def keyword_entry(
    document: UUID, external_id: str, tag: str, title: str, headings: Sequence[str], text: str
) -> dict[str, Any]:
    """Return the keyword entry of a document's chunk as the sink would write it."""
    return {
        "document_id": str(document),
        "tenant": TENANT,
        "source": SOURCE,
        "external_id": external_id,
        "acl_tags": [tag],
        "required_tags": [EVERYONE],
        "required_count": 1,
        "source_url": None,
        "author": None,
        "media_type": "text/plain",
        "source_modified_at": None,
        "metadata": {},
    } | content_fields(title, headings, text)


async def fill_keywords(es: AsyncElasticsearch, index: str, documents: int) -> None:
    operations: list[bytes] = []
    for n, id_, chunk, text in ids(documents, CHARACTERS):
        action = {"index": {"_index": index, "_id": str(chunk), "version": n, "version_type": "external_gte"}}
        tag = f"{SOURCE}/team-{n % (documents // DOCUMENTS_A_GROUP)}"
        entry = keyword_entry(id_, f"{n}.md", tag, f"Title {n}", (), text)
        operations += [json.dumps(action).encode(), json.dumps(entry).encode()]
        if len(operations) >= 2 * BULK_ENTRIES or n == documents:
            answer = await es.options(request_timeout=300).bulk(operations=operations)  # type: ignore[arg-type]  # bytes go as is
            assert not answer["errors"]
            operations = []
    await es.options(request_timeout=300).indices.refresh(index=index)


@dataclass(slots=True)
class Filled:
    """A library of one size, and the background audit that works on it."""

    library: Library
    documents: int
    audit: BackgroundAudit
    turn: int = 0
    """Number of the turn; each turn uses other documents."""

    @property
    def groups(self) -> int:
        return self.documents // DOCUMENTS_A_GROUP


HOLDER = Holder(TENANT, SOURCE, 1)
Step = Callable[[Filled], Awaitable[object]]


async def listing_page(filled: Filled) -> None:
    """Compare a page of a connector's listing in which nothing has changed."""
    kafka: Any = NoKafka()
    nothing: Any = None
    sweep = Sweep(
        nothing,
        nothing,
        Publisher(kafka, Rows(filled.library.pool, HOLDER)),
        Clock(None),
        set_aside=SetAside(),
        between_pages=lambda: None,
        on_no_revisions=lambda: None,
        on_done=lambda: None,
    )
    start = filled.turn * LISTED % (filled.documents - LISTED) + 1
    page = {
        f"{n}.md": Listed(external_id=f"{n}.md", acl_tags=[f"team-{n % filled.groups}"], revision="1")
        for n in range(start, start + LISTED)
    }
    await sweep._compare_page(page, datetime.now(UTC), loading=False, new_documents=0)


async def sweeps_end(filled: Filled) -> None:
    """Read a page of the rows in which a sweep, after a complete listing, looks for unlisted documents."""
    start = filled.turn * PAGE % filled.documents + 1
    page = await Rows(filled.library.pool, HOLDER).sweep_page(datetime.now(UTC), f"{start}.md")
    assert page


async def webhooks(filled: Filled) -> None:
    """List, resolve, publish and record groups, each of which one person has left and another has joined."""
    first = filled.turn * CHANGED_GROUPS
    groups = [n * 17 % filled.groups for n in range(first, first + CHANGED_GROUPS)]

    class Source:
        async def groups(self, _tags: Collection[str]) -> AsyncIterator[Group]:
            for group in groups:
                members = [*range(group - 9, group), group + filled.groups // 2]
                yield Group(f"team-{group}", [f"p{member % filled.groups}" for member in members])

    kafka: Any = NoKafka()
    source: Any = Source()
    identities = Identities(source, kafka, filled.library.pool, HOLDER, Clock(None), between_pages=lambda: None)
    published = await identities.read_some(frozenset(f"team-{group}" for group in groups))
    assert published == {"identities": 2 * CHANGED_GROUPS}


async def reconciliation(filled: Filled) -> None:
    """Compare a page of each of the four walks: documents of the ledger, rows, principals of the ledger, published
    sets."""
    kafka: Any = NoKafka()
    nobody: Any = None  # nothing is marked here
    pool = filled.library.pool
    reconcile = Reconcile(
        pool,
        State(pool, HOLDER),
        Publisher(kafka, Rows(pool, HOLDER)),
        nobody,
        Clock(None),
        between_pages=lambda: None,
        read_again=lambda _ids, _groups: None,
    )
    start, comparison = filled.turn * 97 % filled.groups + 1, LedgerComparison()
    documents = DocumentComparison(Rows(pool, HOLDER))
    await documents.compare_ledger(str(document_id(TENANT, SOURCE, f"{start}.md")), comparison)
    await documents.compare_rows(f"{start}.md", comparison)
    await reconcile._compare_ledger_members(f"p{start}", comparison)
    await reconcile._compare_published_sets(f"p{start}", comparison)
    assert not [key for key in comparison.differences if key[0] == "document"]


async def beat(filled: Filled) -> None:
    """Write and read what an instance of a connector does every second, and count what it counts every 20 seconds."""
    await State(filled.library.pool, HOLDER).heartbeat({}, {"unchanged": 1}, [])
    await Rows(filled.library.pool, HOLDER).problems()


async def sweeper(filled: Filled) -> None:
    kafka: Any = NoKafka()
    library = filled.library
    announcer = Announcer(library.pool, kafka, library.metrics)
    await Sweeper(library.pool, kafka, announcer, library.metrics, interval_seconds=1, again_in_seconds=0).sweep()


async def announcer(filled: Filled) -> None:
    kafka: Any = NoKafka()
    await Announcer(filled.library.pool, kafka, filled.library.metrics).announce_missed(0)


async def audit_page(filled: Filled) -> None:
    await filled.audit.turn()


async def search(filled: Filled) -> None:
    """Search as a principal in ten groups who may read a hundred documents."""
    principal = f"p{filled.turn * 7 % filled.groups}"
    caller = await filled.library.search.identify(TENANT, principals=[principal])
    response = await filled.library.search.search(f"topic {filled.turn} and place", caller)
    assert response.results


STEPS: dict[str, Step] = {
    f"a sweep's page: {LISTED} documents listed, unchanged": listing_page,
    f"a sweep's end: {PAGE:,} rows compared with the listing": sweeps_end,
    f"a batch of webhooks: in {CHANGED_GROUPS} groups one has left and one joined": webhooks,
    f"a step of reconciliation: four pages of {COMPARED}": reconciliation,
    "a connector's beat": beat,
    f"the sweeper: {PENDING} documents pending": sweeper,
    f"the announcer: {PENDING} documents not announced": announcer,
    f"an audit step: {LIMITS.documents} documents compared": audit_page,
    "a search: ten groups, a hundred readable documents": search,
}


async def filled(stack: Stack, closing: AsyncExitStack, documents: int) -> Filled:
    library = await closing.enter_async_context(Library.create(stack, FewDimensions()))
    began = perf_counter()

    async def ledger() -> None:
        async with library.pool.connection() as connection:
            await fill_ledger(connection, library.generation, documents)

    await asyncio.gather(ledger(), fill_keywords(library.es, library.generation.keyword_index, documents))
    print(f"{documents} documents: filled in {perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    kafka: Any = NoKafka()
    audit = BackgroundAudit(
        library.pool, library.es, kafka, library.metrics, AuditSettings(documents_per_second=1e9, repair="none")
    )
    return Filled(library, documents, audit)


@dataclass(frozen=True, slots=True)
class Cost:
    ms: float
    """Median of the turns, in milliseconds."""
    processor_ms: float
    """Mean processor time of the turns: this process, Postgres and Elasticsearch together."""


Table = dict[str, dict[int, Cost]]
"""The cost of a turn, by step and number of documents."""


def processor_seconds(servers: Sequence[int]) -> float:
    """Return the processor seconds of these processes and their children, including children that have ended."""
    total = 0.0
    for server in map(psutil.Process, servers):
        for process in (server, *server.children(recursive=True)):
            try:
                total += sum(process.cpu_times()[:4])
            except psutil.NoSuchProcess:  # ended since: its parent counts it at the next reading
                continue
    return total


async def measure(stack: Stack, libraries: Sequence[Filled]) -> Table:
    servers = [server.pid for server in stack.services() if server.pid and server.name in ("postgres", "elasticsearch")]
    table: Table = {}
    for name, step in STEPS.items():
        took: dict[int, list[tuple[float, float]]] = {library.documents: [] for library in libraries}
        for turn in range(WARM + TIMES):
            for library in libraries:
                library.turn = turn
                await library.library.execute("UPDATE audit_runs SET next_at = now(), started_at = '2000-01-01'")
                await library.library.execute("UPDATE index_state SET next_at = now() WHERE seq < want_seq")
                servers_before, own_before, began = processor_seconds(servers), process_time(), perf_counter()
                await step(library)
                ms, processor = perf_counter() - began, process_time() - own_before
                processor += processor_seconds(servers) - servers_before
                if turn >= WARM:
                    took[library.documents].append((ms * 1_000, processor * 1_000))
        table[name] = {
            documents: Cost(round(median(ms for ms, _ in turns), 1), round(mean(cpu for _, cpu in turns), 1))
            for documents, turns in took.items()
        }
        print(f"{name}: {table[name]}", file=sys.stderr, flush=True)
    return table


async def main(sizes: Sequence[int], written: Path | None) -> None:
    stack = Stack(home())
    async with AsyncExitStack() as closing:
        libraries = [await filled(stack, closing, size) for size in sizes]
        table = await measure(stack, libraries)
    [page] = [took[sizes[-1]].processor_ms for name, took in table.items() if STEPS[name] is audit_page]
    minutes = 1_000_000 / LIMITS.documents * page / 1_000 / PROCESSOR_SHARE / 60
    report = {
        "machine": description(),
        "sizes": list(sizes),
        "audit_minutes": round(minutes),
        "steps": {name: {str(size): asdict(cost) for size, cost in took.items()} for name, took in table.items()},
    }
    print("\n".join(scale_table(report)))
    if written is not None:
        written.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asyncio.run(main(options.sizes, options.json))
