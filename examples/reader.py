"""Another team's query service, complete: hybrid search with access applied, and a cache that announcements keep fresh.

Reads lines `PRINCIPAL QUESTION` and answers each with one line of JSON. docs/readers.md explains every step.
Needs READER_DSN (a login that is a member of penstock_reader), ELASTICSEARCH_URL, KAFKA_BOOTSTRAP, TOPIC, TENANT.
"""

import asyncio
import json
import sys
from os import environ
from uuid import UUID

import psycopg
from aiokafka import AIOKafkaConsumer
from elasticsearch import AsyncElasticsearch
from pgvector import HalfVector
from pgvector.psycopg import register_vector_async
from psycopg.rows import dict_row

from pipeline.embedding.choose import embedder  # any client of the model that readers.generation names will do
from pipeline.runtime.settings import dist, load

CHECKED = """
    WITH found AS MATERIALIZED (SELECT * FROM readers.chunks WHERE id = ANY (%(ids)s))
    SELECT id, doc_id, title, text, source_url FROM found
    WHERE tenant = %(tenant)s AND acl_tags && %(tags)s AND required_tags <@ %(tags)s"""


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
        """The cache saves a search, but never the check of access: the ledger is queried each time."""
        [held] = await self.sql("SELECT readers.access_of(%(tenant)s, %(principal)s) AS tags", principal=principal)
        cache, key = self.cache, (*held["tags"], question)
        if key not in cache:
            cache[key] = await self.candidates(question, held["tags"])
        rows = await self.sql(CHECKED, ids=cache[key], tags=held["tags"])
        return sorted(rows, key=lambda row: cache[key].index(row["id"]))[:top]

    async def candidates(self, question, tags):
        """Chunk ids, the best first: both rankings added up by reciprocal ranks."""
        [generation] = await self.sql("SELECT keyword_index FROM readers.generation")
        query = HalfVector(await self.model.embed_query(question))
        nearest = "SELECT id FROM readers.nearest(%(query)s, %(tenant)s, %(tags)s, 50)"
        near = [row["id"] for row in await self.sql(nearest, query=query, tags=tags)]
        needed = {"required_tags": {"terms": ["*", *tags], "minimum_should_match_field": "required_count"}}
        access = [{"term": {"tenant": self.tenant}}, {"terms": {"acl_tags": tags}}, {"terms_set": needed}]
        words = {"multi_match": {"query": question, "fields": ["title^2", "text"]}}
        search = {"bool": {"must": words, "filter": access}}
        hits = await self.es.search(index=generation["keyword_index"], query=search, size=50, source=False)
        rankings = near, [UUID(hit["_id"]) for hit in hits["hits"]["hits"]]
        worth = {id_: sum(1 / (60 + r.index(id_)) for r in rankings if id_ in r) for r in rankings for id_ in r}
        return sorted(worth, key=worth.get, reverse=True)


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


asyncio.run(main())
