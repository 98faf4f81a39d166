"""How much of everything a library of a given size needs: arithmetic over what was measured, without any I/O.

Every constant says where it comes from. ``load`` is bench/results/query_load.json (python -m bench.query_load),
``searched`` query.json there (python -m bench.query), ``sized`` sizing.json (python -m bench.sizing);
tests/unit/deploy/test_plan.py compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pipeline.core.graph import CAREFUL_PARAMETERS, build_parameters, usual_quantisation
from pipeline.core.model import MAX_GRAPH_DIMENSIONS, SKETCH_BLOCK, Quantisation, VectorIndex

GB = 10**9
MAX_ENTRY_DIMENSIONS = 4_096
"""The most that Elasticsearch indexes."""
SECONDS_A_MONTH = 730 * 3600

PAGE_BYTES = 8152
"""Usable bytes of a Postgres page of 8,192, without its header and pgvector's own fields."""
GRAPH_BYTES, GRAPH_NEIGHBOUR_BYTES = 98, 12
"""A graph's entry without its vector: two tuples' headers and 10 heap pointers, and twice 6 bytes for each neighbour
(pgvector's m). An entry never crosses a page. sized: within 3 %, of sketches within 5 %."""
INDEX_ENTRY_BYTES, INDEX_SPARE = 70, 1.1
"""An entry of the index of documents without its sketch, and the share of its pages that is free (sized: 284 bytes at
1,536 dimensions)."""
STORED_OUT_OF_LINE_BYTES = 2000
"""Postgres keeps longer values in TOAST, taking half as much again (sized)."""
ROW_BYTES = 250
"""A chunk's row without text and vector, and its entries in three small indexes (sized)."""
BODY_SHARE = 0.46
"""The share of a document's text that is left when Postgres compresses it (sized)."""
LEDGER_DOCUMENT_BYTES, LEDGER_CHUNK_BYTES = 2_700, 150
"""documents, manifests, index_state, document_events with their indexes (sized)."""
KEYWORD_SHARE = 1.83
"""Elasticsearch's bytes for one of text (sized)."""
KEYWORD_SHARD_BYTES = 30 * GB
"""Elastic's own advice is 10 to 50 GB."""
GRAPH_HEADROOM = 1.25
"""Memory beyond the graph itself: the ledger's hot rows and the connections."""
KEY_BYTES = 43
"""A chunk in the primary key of its table (sized). Where vectors are searched in Elasticsearch, every result is looked
up in it, and it is what Postgres has to hold in memory."""
ENTRY_VECTOR_BYTES = 64
"""Memory of a quantised vector in Elasticsearch beyond one bit a dimension: its corrections and its neighbours in the
graph. sized: within 4 %."""
ENTRY_VECTOR_DISK_BYTES = 305
"""Disk beyond that memory and the whole vector of four bytes a dimension, which scores the nearest. sized: within
1 %."""
ENTRY_SERVER_SECONDS, ENTRY_SERVER_SECONDS_PER_DIMENSION = 0.00056, 2.2e-6
"""Processor time of Elasticsearch to put an entry's vector into its graph, merged to one segment (sized)."""
ENTRY_CLIENT_SECONDS_PER_DIMENSION = 2.8e-7
"""Processor time of a keywords worker to send an entry's vector (sized)."""
SHARD_SECONDS, SHARD_SECONDS_PER_DIMENSION = 0.013, 6.5e-6
"""Processor time of a search for the nearest vectors in one shard (sized; by a Java without vector instructions, among
a few thousand entries, of which it looked at 2,000, as each of three shards does: pipeline.stores.dense)."""
MAX_HEAP_GB = 31
"""The largest heap of an Elasticsearch node; never more than half of its memory: Elastic's own advice. The rest caches
files."""

DETECT_CHUNKS_PER_SECOND = 1_050.0
KEYWORDS_CHUNKS_PER_SECOND = 1_050.0
"""One process each, in bulk (load: 4,700 and 4,600 of 370 characters, which are 1,080 of 1,600)."""
VECTORS_ROWS_PER_SECOND = 172.0
"""One process into the usual graph: 5.8 ms of a processor a row (sized)."""
ROWS_WITHOUT_GRAPH_PER_SECOND = 2_185.0
"""One process where no graph stands (load: 8,740 of 384 dimensions, a quarter of the bytes)."""
BUILT_ROWS_PER_SECOND = 1_316.0
"""Building the usual graph over existing rows, by one processor (sized)."""
CAREFUL_BUILD, CAREFUL_ADDITION = 2.2, 2.5
"""How many times as long both take where a graph of halfvecs is built with care: 1.8 and 14.4 ms (docs/adr/0118)."""
SHORT_BUILD = 1.9
"""How many times as long a build takes for halfvecs of few dimensions, with twice the candidates (docs/adr/0128)."""
SKETCHES_BUILD, SKETCHES_ADDITION = 0.7, 0.4
"""The same for a graph of sketches that is built with care: .5 and 2.3 ms (docs/adr/0122)."""
CHUNKS_PER_CHANGE = 3.0
"""Chunks that are embedded again for an edit, at p95 (tests/unit/pipeline/core/test_chunking_stability.py)."""
PEAK = 3.0
"""The busiest hour against the mean. An assumption."""
SERVICE_SECONDS_PER_QUERY = 0.017
"""Processor time of the query service, with relevance feedback (searched; 0.010 without)."""
STORES_SECONDS_PER_QUERY = 0.053
"""Processor time of both stores together, at most: where a tenth may be read (docs/performance.md). Where all may be
read, two idle cores answered 33 searches/s (searched), which leaves 43 ms for them, clients included."""
BUSY = 0.6
"""How busy a processor may be in the mean, so that queues stay short."""
SMALLEST_PARTITIONS = 8
"""topics/registry.py."""
RETAINED_DAYS = 14
"""The retention of the documents' topics."""


@dataclass(frozen=True, slots=True)
class Workload:
    documents: int
    chunks_per_document: float = 25.0
    chunk_characters: int = 1_600
    """400 tokens of four characters."""
    chunk_tokens: int = 400
    dimensions: int = 1_536
    vectors: VectorIndex = "pgvector"
    """Where they are searched."""
    chosen_quantisation: Quantisation | None = None
    """None: what a new generation of so many dimensions has."""
    changes_per_hour: float = 1_000.0
    queries_per_second: float = 10.0
    load_hours: float = 168.0
    """Hours in which everything is to be read for the first time."""
    replication: int = 3
    keyword_replicas: int = 1
    node_memory_gb: float = 256.0
    """Memory of a node of the store that searches the vectors."""

    @property
    def quantisation(self) -> Quantisation:
        """The form in which a graph in pgvector holds vectors; Elasticsearch's holds one bit a dimension."""
        return self.chosen_quantisation or usual_quantisation(self.dimensions, self.vectors)


@dataclass(frozen=True, slots=True)
class Prices:
    """A month's, in any one currency; tokens by the million. The defaults are assumptions: give your own."""

    processor: float = 25.0
    memory_gb: float = 3.5
    disk_gb: float = 0.1
    million_tokens: float = 0.13


@dataclass(frozen=True, slots=True)
class Plan:
    chunks: int
    graph_gb: float
    """The HNSW index, which has to lie in memory: a walk reads it at random. In Elasticsearch, that of one copy."""
    graph_hours: float
    """To build it anew (a rebuild, another model), by one processor; parallel workers divide it."""
    postgres_disk_gb: float
    """With room for a second generation beside the first."""
    postgres_memory_gb: float
    postgres_nodes: int
    keyword_disk_gb: float
    """Replicas included, and room for a rebuild."""
    keyword_memory_gb: float
    """Beyond the heap, in all: the graphs with their replicas. 0 where Postgres searches the vectors."""
    keyword_nodes: int
    keyword_shards: int
    kafka_disk_gb: float
    detect: int
    vectors: int
    keywords: int
    """Processes: for the first load within its hours, or the peak of changes, whichever is more."""
    partitions: int
    load_chunks_per_second: float
    query_processors: int
    store_processors: int
    load_tokens: int
    load_cost: float
    tokens_a_month: int
    cost_processors: float
    cost_memory: float
    cost_disk: float
    cost_tokens: float
    """A month each: workers, service and stores; the graph; all disks; what changes embed anew."""
    cost_a_month: float


def graph_bytes(dimensions: int, quantisation: Quantisation) -> float:
    """Bytes of one chunk in pgvector's HNSW index. Raises ValueError where pgvector cannot index so many dimensions."""
    most = MAX_GRAPH_DIMENSIONS[quantisation]
    if not 1 <= dimensions <= most:
        raise ValueError(f"{dimensions} dimensions: pgvector indexes 1 to {most:,} as {quantisation}")
    vector = 2 * dimensions if quantisation == "halfvec" else sketch_bytes(dimensions)
    entry = GRAPH_BYTES + build_parameters(dimensions, quantisation).neighbours * GRAPH_NEIGHBOUR_BYTES + vector
    return 8192 / max(1, PAGE_BYTES // entry)


def sketch_bytes(dimensions: int) -> int:
    return ceil(dimensions / SKETCH_BLOCK) * SKETCH_BLOCK // 8


def entry_vector_bytes(dimensions: int) -> tuple[float, float]:
    """Bytes of one chunk's vector in Elasticsearch: in memory, and on disk. Raises ValueError where Elasticsearch
    cannot index so many dimensions."""
    if not 1 <= dimensions <= MAX_ENTRY_DIMENSIONS:
        raise ValueError(f"{dimensions} dimensions: Elasticsearch indexes 1 to {MAX_ENTRY_DIMENSIONS:,}")
    held = ceil(dimensions / 8) + ENTRY_VECTOR_BYTES
    return held, held + 4 * dimensions + ENTRY_VECTOR_DISK_BYTES


def row_bytes(characters: int, dimensions: int) -> float:
    """Bytes of one chunk in its table: always with the whole halfvec, which scores the results of a quantised graph,
    and with a sketch, once more in the index of documents."""
    vector = 2 * dimensions + 8
    stored = vector * (1.5 if vector > STORED_OUT_OF_LINE_BYTES else 1)
    return ROW_BYTES + characters + stored + sketch_bytes(dimensions) + index_entry_bytes(dimensions)


def index_entry_bytes(dimensions: int) -> float:
    """Bytes of one chunk in the index of documents: all that a search reads of most chunks that a caller may read."""
    return sketch_bytes(dimensions) * INDEX_SPARE + INDEX_ENTRY_BYTES


def plan(workload: Workload, prices: Prices | None = None) -> Plan:
    """The machines that a workload needs, and their cost. Raises ValueError for an impossible workload."""
    prices = prices or Prices()
    if min(workload.documents, workload.chunks_per_document, workload.load_hours, workload.node_memory_gb) <= 0:
        raise ValueError("documents, chunks per document, hours and memory must be more than nothing")
    chunks = ceil(workload.documents * workload.chunks_per_document)
    text = chunks * workload.chunk_characters
    rows = chunks * row_bytes(workload.chunk_characters, workload.dimensions)
    ledger = workload.documents * LEDGER_DOCUMENT_BYTES + chunks * LEDGER_CHUNK_BYTES + text * BODY_SHARE
    keyword = text * KEYWORD_SHARE
    copies = 1 + workload.keyword_replicas
    changes = workload.changes_per_hour / 3600
    load = chunks / (workload.load_hours * 3600)
    touched = changes * PEAK * CHUNKS_PER_CHANGE  # chunks a second at the peak
    read = changes * PEAK * workload.chunks_per_document  # detect cuts a changed document whole
    written = max(load, touched)
    if workload.vectors == "pgvector":
        graph = postgres_graph = chunks * graph_bytes(workload.dimensions, workload.quantisation)
        parameters = build_parameters(workload.dimensions, workload.quantisation)
        if workload.quantisation == "binary":
            build, addition = SKETCHES_BUILD, SKETCHES_ADDITION
        else:
            careful = parameters == CAREFUL_PARAMETERS
            build, addition = (CAREFUL_BUILD, CAREFUL_ADDITION) if careful else (SHORT_BUILD, 1.0)
        graph_seconds = chunks / BUILT_ROWS_PER_SECOND * build
        postgres_memory = graph * GRAPH_HEADROOM
        keyword_memory, entry_seconds, shard_seconds = 0.0, 0.0, 0.0
        rows_per_second = VECTORS_ROWS_PER_SECOND / addition
        entries_per_second = KEYWORDS_CHUNKS_PER_SECOND
    else:
        held, stored = entry_vector_bytes(workload.dimensions)
        graph, postgres_graph = chunks * held, 0.0
        entry_seconds = ENTRY_SERVER_SECONDS + workload.dimensions * ENTRY_SERVER_SECONDS_PER_DIMENSION
        shard_seconds = SHARD_SECONDS + workload.dimensions * SHARD_SECONDS_PER_DIMENSION
        graph_seconds = chunks * entry_seconds
        postgres_memory = chunks * KEY_BYTES * GRAPH_HEADROOM
        keyword += chunks * stored
        keyword_memory = graph * copies
        rows_per_second = ROWS_WITHOUT_GRAPH_PER_SECOND
        entries_per_second = 1 / (
            1 / KEYWORDS_CHUNKS_PER_SECOND + workload.dimensions * ENTRY_CLIENT_SECONDS_PER_DIMENSION
        )
    workers = {
        "detect": max(1, ceil(max(load, read) / DETECT_CHUNKS_PER_SECOND)),
        "vectors": max(1, ceil(written / rows_per_second)),
        "keywords": max(1, ceil(written / entries_per_second)),
    }
    cache_gb = workload.node_memory_gb - min(MAX_HEAP_GB, workload.node_memory_gb / 2)
    document = text / workload.documents
    kafka = workload.replication * document * (workload.documents + workload.changes_per_hour * 24 * RETAINED_DAYS)
    query = ceil(workload.queries_per_second * SERVICE_SECONDS_PER_QUERY / BUSY)
    shards = max(1, ceil(keyword / KEYWORD_SHARD_BYTES))
    search_seconds = STORES_SECONDS_PER_QUERY + shards * shard_seconds
    stores = ceil((workload.queries_per_second * search_seconds + written * entry_seconds * copies) / BUSY)
    load_tokens = chunks * workload.chunk_tokens
    month_tokens = ceil(changes * SECONDS_A_MONTH * CHUNKS_PER_CHANGE * workload.chunk_tokens)
    postgres_disk = 2 * (postgres_graph + rows) + ledger
    keyword_disk = 2 * keyword * copies
    disk = postgres_disk + keyword_disk + kafka
    processors = (query + stores + sum(workers.values())) * prices.processor
    memory = (postgres_memory + keyword_memory) / GB * prices.memory_gb
    disks = disk / GB * prices.disk_gb
    tokens = month_tokens / 1e6 * prices.million_tokens
    return Plan(
        chunks=chunks,
        graph_gb=graph / GB,
        graph_hours=graph_seconds / 3600,
        postgres_disk_gb=postgres_disk / GB,
        postgres_memory_gb=postgres_memory / GB,
        postgres_nodes=max(1, ceil(postgres_memory / GB / workload.node_memory_gb)),
        keyword_disk_gb=keyword_disk / GB,
        keyword_memory_gb=keyword_memory / GB,
        keyword_nodes=max(copies, ceil(keyword_memory / GB / cache_gb)),
        keyword_shards=shards,
        kafka_disk_gb=kafka / GB,
        **workers,
        partitions=max(SMALLEST_PARTITIONS, *workers.values()),
        load_chunks_per_second=load,
        query_processors=max(1, query),
        store_processors=max(1, stores),
        load_tokens=load_tokens,
        load_cost=load_tokens / 1e6 * prices.million_tokens,
        tokens_a_month=month_tokens,
        cost_processors=processors,
        cost_memory=memory,
        cost_disk=disks,
        cost_tokens=tokens,
        cost_a_month=processors + memory + disks + tokens,
    )
