"""Another team's query service, complete: our hybrid search, access applied, a cache that announcements keep fresh.

Reads lines `PRINCIPAL QUESTION` and answers each with one line of JSON. docs/readers.md explains every step.
Needs READER_DSN (a login that is a member of penstock_reader), ELASTICSEARCH_URL, KAFKA_BOOTSTRAP, TOPIC, TENANT.
"""

import asyncio
import json
import re
import sys
from os import environ
from pathlib import Path
from statistics import pstdev
from uuid import UUID

import psycopg
from aiokafka import AIOKafkaConsumer
from elasticsearch import AsyncElasticsearch
from pgvector import HalfVector
from pgvector.psycopg import register_vector_async
from psycopg.rows import dict_row

from pipeline.core.identifiers import identifiers  # a list of patterns: names that are compared whole
from pipeline.embedding.choose import embedder  # any client of the model that readers.generation names will do
from pipeline.runtime.settings import dist, load

CHECKED = """
    WITH found AS MATERIALIZED (SELECT * FROM readers.chunks WHERE id = ANY (%(ids)s))
    SELECT id, doc_id, title, text, source_url FROM found
    WHERE tenant = %(tenant)s AND acl_tags && %(tags)s AND required_tags <@ %(tags)s"""
KEYWORDS = (Path(__file__).parent / "keyword_query.json").read_text()
DEPTH, SPARE = 64, 10


def filled(part, values):
    if isinstance(part, dict):
        return {key: filled(value, values) for key, value in part.items()}
    return [filled(value, values) for value in part] if isinstance(part, list) else values.get(part, part)


def keyword_query(question, tenant, tags):
    """The query of docs/readers.md for a question of at most 150 words."""
    words = sorted({*re.findall(r"[^\W_]{2,}", question.lower())})
    values = {"$question": question, "$words": words, "$tenant": tenant, "$tags": tags, "$tags and *": ["*", *tags]}
    query = filled(json.loads(KEYWORDS), values)
    clauses = query["bool"]["must"]["bool"]["should"]
    for_identifiers = clauses.pop()
    clauses += [filled(for_identifiers, {"$identifier": name}) for name in identifiers(question)[:20]]
    return query


def fused(*rankings):
    """Chunk ids, the best first: the standardised scores of the first DEPTH of each ranking, added up."""
    scores, ranks = {}, {}
    for ranking in rankings:
        floor = max(0.0, ranking[DEPTH][1] if len(ranking) > DEPTH else 0.0)
        heights = [max(0.0, score - floor) for _, score in ranking[:DEPTH]]
        spread = pstdev([*heights, *[0.0] * max(1, 10 - len(heights))])
        for rank, ((id_, _), height) in enumerate(zip(ranking, heights, strict=False)):
            scores[id_] = scores.get(id_, 0.0) + (height / spread if spread > 1e-9 else 0.0)
            ranks[id_] = min(ranks.get(id_, rank), rank)
    return sorted(scores, key=lambda id_: (-scores[id_], ranks[id_], id_))


class Reader:
    def __init__(self, postgres, es, model, tenant):
        self.postgres, self.es, self.model, self.tenant, self.cache = postgres, es, model, tenant, {}

    async def follow(self, announcements):
        async for record in announcements:  # a document that became searchable may answer any earlier question
            if json.loads(record.value)["tenant"] == self.tenant:
                self.cache = {}  # a question under way still writes into the old one

    async def sql(self, statement, **values):
        return await (await self.postgres.execute(statement, values | {"tenant": self.tenant})).fetchall()

    async def answer(self, principal, question, top=5):
        """The cache saves a search, but never the check of access: the ledger is queried each time, before anything is
        ranked."""
        [held] = await self.sql("SELECT readers.access_of(%(tenant)s, %(principal)s) AS tags", principal=principal)
        cache, key = self.cache, (*held["tags"], question)
        if key not in cache:
            cache[key] = await self.candidates(question, held["tags"])
        ids = [id_ for ranking in cache[key] for id_, _ in ranking]
        rows = {row["id"]: row for row in await self.sql(CHECKED, ids=ids, tags=held["tags"])}
        ranking = fused(*([hit for hit in ranking if hit[0] in rows] for ranking in cache[key]))
        return [rows[id_] for id_ in ranking[:top]]

    async def candidates(self, question, tags):
        """The nearest chunks and those with most words in common, each with its score."""
        [generation] = await self.sql("SELECT keyword_index FROM readers.generation")
        query = HalfVector(await self.model.embed_query(question))
        nearest = "SELECT id, 1 - distance AS cosine FROM readers.nearest(%(query)s, %(tenant)s, %(tags)s, %(top)s)"
        near = await self.sql(nearest, query=query, tags=tags, top=DEPTH + SPARE)
        words = keyword_query(question, self.tenant, tags)
        index = generation["keyword_index"]
        hits = await self.es.search(index=index, query=words, size=DEPTH + SPARE, source=False)
        by_words = [(UUID(hit["_id"]), hit["_score"]) for hit in hits["hits"]["hits"]]
        return [(row["id"], row["cosine"]) for row in near], by_words


async def main():
    es, model = AsyncElasticsearch(environ["ELASTICSEARCH_URL"]), embedder(load().embedding, dist() / "models")
    postgres = psycopg.AsyncConnection.connect(environ["READER_DSN"], autocommit=True, row_factory=dict_row)
    consumer = AIOKafkaConsumer(environ["TOPIC"], bootstrap_servers=environ["KAFKA_BOOTSTRAP"])
    async with await postgres as postgres, es, consumer as announcements:
        await register_vector_async(postgres)
        reader = Reader(postgres, es, model, environ["TENANT"])
        following = asyncio.create_task(reader.follow(announcements))
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await reader.answer(*line.split(maxsplit=1)), default=str), flush=True)
        following.cancel()


if __name__ == "__main__":
    asyncio.run(main())
