"""``penstock plan``: what a library of a given size needs, before there is one."""

from __future__ import annotations

from dataclasses import asdict
from math import ceil
from typing import Annotated

import typer

from cli.output import Json, print_json, stdout
from pipeline.core.model import Quantisation, VectorIndex
from pipeline.maintenance.plan import Plan, Prices, Workload
from pipeline.maintenance.plan import plan as planned


def plan(
    documents: Annotated[int, typer.Option(min=1, help="Number of documents.")],
    chunks_per_document: Annotated[float, typer.Option(min=0.01, help="Mean number of chunks of a document.")] = 25.0,
    changes_per_hour: Annotated[float, typer.Option(min=0, help="Documents that change per hour.")] = 1_000.0,
    queries_per_second: Annotated[float, typer.Option(min=0, help="Searches per second.")] = 10.0,
    dimensions: Annotated[int, typer.Option(min=1, help="Dimensions of the model's vectors.")] = 1_536,
    vectors: Annotated[VectorIndex, typer.Option(help="Store that searches the vectors.")] = "pgvector",
    quantisation: Annotated[
        Quantisation | None,
        typer.Option(
            help="What a graph in pgvector holds of each vector; binary: a sketch. Default: as in a new system, which"
            " holds sketches from 1,024 dimensions on."
        ),
    ] = None,
    load_hours: Annotated[float, typer.Option(min=0.01, help="Hours that the first load may take.")] = 168.0,
    node_memory_gb: Annotated[
        float, typer.Option(min=1, help="Memory of one node of the store that searches the vectors, in GB.")
    ] = 256.0,
    price_processor: Annotated[float, typer.Option(min=0, help="Price of a processor, per month.")] = 25.0,
    price_memory_gb: Annotated[float, typer.Option(min=0, help="Price of a GB of memory, per month.")] = 3.5,
    price_disk_gb: Annotated[float, typer.Option(min=0, help="Price of a GB of disk, per month.")] = 0.1,
    price_million_tokens: Annotated[
        float, typer.Option(min=0, help="Embedding model's price of a million tokens.")
    ] = 0.13,
    json_output: Json = False,
) -> None:
    """Estimate the partitions, processes, shards, memory and disk that a workload needs, and their cost.

    The estimate uses measured numbers (docs/scaling.md), and needs no running system.

    Examples:

      penstock plan --documents 2000000 --changes-per-hour 10000 --queries-per-second 500

      penstock plan --documents 40000000 --vectors elasticsearch
    """
    size = Workload(
        documents,
        chunks_per_document,
        dimensions=dimensions,
        vectors=vectors,
        chosen_quantisation=quantisation,
        changes_per_hour=changes_per_hour,
        queries_per_second=queries_per_second,
        load_hours=load_hours,
        node_memory_gb=node_memory_gb,
    )
    prices = Prices(price_processor, price_memory_gb, price_disk_gb, price_million_tokens)
    try:
        result = planned(size, prices)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if json_output:
        print_json(asdict(result))
        return
    for line in _lines(size, result):
        stdout.print(line, soft_wrap=True)


def _lines(size: Workload, p: Plan) -> list[str]:
    if size.vectors == "pgvector":
        stored: str = size.quantisation
        nodes = ""
    else:
        stored = "one bit a dimension"
        nodes = f" on {p.keyword_nodes} node(s) with {p.keyword_memory_gb:,.0f} GB of memory beyond the heap"
    lines = [
        f"{size.documents:,} documents, {p.chunks:,} chunks of {size.dimensions} dimensions",
        f"graph          {p.graph_gb:,.1f} GB ({stored}), in memory;"
        f" {p.graph_hours:,.1f} hours of one processor to rebuild it",
        f"Postgres       {ceil(p.postgres_memory_gb):,} GB of memory on {p.postgres_nodes} node(s),"
        f" {p.postgres_disk_gb:,.0f} GB of disk with room for a second generation",
        f"Elasticsearch  {p.keyword_shards} shard(s){nodes},"
        f" {p.keyword_disk_gb:,.0f} GB of disk with replicas and a rebuild",
        f"Kafka          {p.partitions} partitions a topic, {p.kafka_disk_gb:,.0f} GB of disk with replicas",
        f"workers        detect {p.detect}, vectors {p.vectors}, keywords {p.keywords}"
        f" (the first load: {p.load_chunks_per_second:,.0f} chunks/s)",
        f"queries        {p.query_processors} processors for the service, {p.store_processors} at most for the stores",
        f"embedding      {p.load_tokens / 1e6:,.0f} M tokens for the first load ({p.load_cost:,.0f}),"
        f" {p.tokens_a_month / 1e6:,.0f} M a month",
        f"a month        {p.cost_a_month:,.0f} at these prices: processors {p.cost_processors:,.0f}, memory"
        f" {p.cost_memory:,.0f}, disk {p.cost_disk:,.0f}, tokens {p.cost_tokens:,.0f}",
    ]
    if size.vectors == "pgvector" and p.postgres_nodes > 1:
        lines.append("note           pgvector searches on one node: use a larger node, or --vectors elasticsearch")
    return lines
