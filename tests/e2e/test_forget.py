"""Erasure on real services: a name is planted wherever it may come to stand, and looked for everywhere afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from psycopg import sql

from pipeline.core.identity import document_id
from pipeline.kafka.client import deliver, producer
from pipeline.kafka.stopping import stop_consumer
from pipeline.ledger import metadata_keys, producers
from pipeline.maintenance.retention import Retention
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import RetentionSettings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stages.identities import TOMBSTONE
from pipeline.stores.elasticsearch import connect
from pipeline.stores.postgres import open_pool
from query.answers.review import author_digests_of_person
from tests.support.deploy.roles_kit import define_roles, logins
from tests.support.space import Space, now
from topics.messages import ConversationRecorded, DocumentDeleted, DocumentUpserted, IdentityChanged, Pair
from topics.registry import CONVERSATIONS, DOCUMENTS_LIVE, IDENTITIES, TOPICS
from topics.signatures import key_id, new_private_key, public_key_of

pytestmark = pytest.mark.stack

NAME = "xanthippequux"
PERSON = f"{NAME}@acme.com"
KEY = "a key of the installation, long".replace(" ", "-").ljust(40, "x")
OLD = "now() - interval '1 hour'"


def start_workers(space: Space) -> None:
    space.environment["PENSTOCK_STREAM_VITALS_SECONDS"] = "0.5"
    space.environment["PENSTOCK_FEEDBACK_KEYS"] = KEY
    space.start("detect", "vectors", "keywords")


@pytest.fixture
async def working(space: Space) -> Space:
    start_workers(space)
    return space


def written(external_id: str, content: str, **fields: Any) -> DocumentUpserted:
    given = {"acl_tags": ["staff"], "title": external_id, "media_type": "text/markdown", **fields}
    return DocumentUpserted(
        tenant="acme", source="hr", external_id=external_id, observed_at=now(), version=1, content=content, **given
    )


async def plant(space: Space) -> DocumentUpserted:
    """The name in every place that a document or a person can leave it in."""
    jane = written(
        f"terminations/{NAME}.md",
        f"# About {NAME}\n\nreason: illness of {NAME}",
        title=f"Termination of {NAME}",
        author=PERSON,
        source_url=f"https://hr/{NAME}",
        metadata={"employee": NAME},
        acl_tags=["hr", f"user:{PERSON}"],
    )
    rules = written("rules.md", "Be kind to each other.", author=PERSON)
    await space.publish(jane, rules)
    member = IdentityChanged(tenant="acme", source="hr", principal=PERSON, groups=["staff"], observed_at=now())
    await space.publish(member, topic=IDENTITIES)
    await space.settled([jane, rules])
    id_ = document_id("acme", "hr", jane.external_id)
    made, answer_id = uuid4(), uuid4()
    await space.execute("INSERT INTO answer_provenance VALUES ('acme', %s, %s)", made, [id_])
    await space.publish(
        *(
            ConversationRecorded(
                tenant="acme",
                source="chat",
                member=who,
                conversation="c",
                observed_at=now(),
                pairs=[Pair(question=f"Where is {NAME}?", answer=f"{NAME} is ill.", asked_at=now(), answer_id=answer)],
            )
            for who, answer in ((PERSON, answer_id), ("ada", made))
        ),
        topic=CONVERSATIONS,
    )
    async with producer(space.settings.kafka) as kafka:
        broken = json.dumps({"title": NAME}).encode()
        await (await kafka.send_raw(DOCUMENTS_LIVE, jane.key.encode(), broken, [("ce_type", b"penstock.nonsense.v1")]))
    for answer in (made, answer_id):
        await space.execute(
            "INSERT INTO answer_reviews (answer_id, tenant, question, mode, model, support, density, reasons,"
            " documents, chunks, answer, unsupported)"
            " VALUES (%s, 'acme', %s, 'm', 'm', 0, 0, '{}', %s, '{}', %s, '{}')",
            answer,
            f"Where is {NAME}?",
            [id_] if answer == made else [],
            f"{NAME} is ill.",
        )
    [(chunk,)] = await space.query("SELECT chunk_ids[1] FROM manifests WHERE document_id = %s", id_)
    for giver, subject in ((b"x", "passage"), (author_digests_of_person([KEY.encode()], "acme", PERSON)[0], "person")):
        await space.execute(
            "INSERT INTO answer_feedback (tenant, giver, subject, chunk_id, query, verdict, note)"
            " VALUES ('acme', %s, %s, %s, %s, 'up', %s)",
            giver,
            subject.encode(),
            chunk if subject == "passage" else uuid4(),
            NAME,
            f"about {NAME}",
        )
    own = f"user:{PERSON}"
    for principals, tags, judged in (
        ([], [], jane.external_id),
        ([PERSON], [], "rules.md"),
        ([], [own], "rules.md"),
        ([], [f"hr/{own}"], "rules.md"),
    ):
        query = uuid4()
        await space.execute(
            "INSERT INTO eval_queries (id, tenant, text, principals, tags, reference)"
            " VALUES (%s, 'acme', %s, %s, %s, %s)",
            query,
            f"Who is {NAME}? {principals} {tags}",
            principals,
            tags,
            NAME,
        )
        await space.execute("INSERT INTO eval_judgements VALUES (%s, 'hr', %s, '', 1)", query, judged)
    for who, made_of in ((PERSON, []), ("ada", [id_])):
        question = uuid4()
        await space.execute(
            "INSERT INTO standing_questions (tenant, id, principal, question, request, sentences, generation)"
            " VALUES ('acme', %s, %s, %s, '{}', %s::jsonb, 'g1')",
            question,
            who,
            f"Where is {NAME}?" if who == PERSON else "Who is ill?",
            json.dumps([{"text": f"{NAME} is ill.", "cites": [1]}] if made_of else []),
        )
        await space.execute(
            "INSERT INTO standing_passages (tenant, question_id, n, chunk_id, document_id)"
            " SELECT 'acme', %s, 1, gen_random_uuid(), unnest(%s::uuid[])",
            question,
            made_of,
        )
    await space.execute(
        f"INSERT INTO superseded SELECT id, 1, {OLD}, '', '', %s, NULL, NULL, NULL, NULL, '{{}}', %s FROM documents"
        " WHERE id = %s",
        NAME,
        NAME,
        id_,
    )
    await space.execute("INSERT INTO connectors (tenant, source, kind) VALUES ('acme', 'hr', 'theirs')")
    await space.execute(
        "INSERT INTO connector_items (tenant, source, external_id, scope, version, content_at, acl_tags)"
        f" VALUES ('acme', 'hr', %s, '', 1, {OLD}, %s)",
        jane.external_id,
        [f"user:{PERSON}"],
    )
    await space.execute("INSERT INTO connector_groups VALUES ('acme', 'hr', 'staff', %s, '{}', now())", [PERSON])
    await space.execute("INSERT INTO connector_groups VALUES ('acme', 'hr', 'owners', '{}', %s, now())", [own])
    await space.execute("INSERT INTO connector_principals VALUES ('acme', 'hr', %s, 'x', now())", PERSON)
    await space.execute(
        "INSERT INTO connector_asks (tenant, source, action, argument) VALUES ('acme', 'hr', 'document', %s)",
        jane.external_id,
    )
    await space.execute(
        "INSERT INTO uploads (id, tenant, source, external_id, version, file_name, sha256, size, acl_tags,"
        " required_tags, metadata, changed) VALUES (%s, 'acme', 'hr', %s, 1, %s, '', 1, '{}', '{}', '{}', 1)",
        uuid4(),
        jane.external_id,
        f"{NAME}.md",
    )
    await space.until(
        "SELECT (SELECT count(*) FROM dead_letters) = 1 AND (SELECT count(*) FROM conversation_provenance) = 1"
        " AND (SELECT count(*) FROM conversation_pairs) = 2 AND (SELECT count(*) FROM memberships) = 1",
    )
    return jane


async def in_postgres(space: Space) -> set[str]:
    """Tables of all schemas that hold the name anywhere, also within bytes."""
    results = set()
    tables = await space.query(
        "SELECT table_schema, table_name FROM information_schema.tables WHERE table_type = 'BASE TABLE'"
        " AND table_schema NOT IN ('pg_catalog', 'information_schema')"
    )
    for schema, table in tables:
        rows = await space.query(
            sql.SQL("SELECT 1 FROM {} t WHERE t::text ILIKE %s OR t::text LIKE %s LIMIT 1")
            .format(sql.Identifier(schema, table))
            .as_string(None),
            f"%{NAME}%",
            f"%{NAME.encode().hex()}%",
        )
        results |= {table for _ in rows}
    return results


async def in_elasticsearch(space: Space) -> int:
    es = connect(space.settings.elasticsearch)
    try:
        every = f"{space.settings.elasticsearch.index_prefix}*"
        await es.indices.refresh(index=every)
        answer = await es.search(index=every, size=1000, query={"match_all": {}})
        assert answer["hits"]["total"]["value"] < 1000
        return sum(NAME in json.dumps(hit) for hit in answer["hits"]["hits"])
    finally:
        await es.close()


async def in_kafka(space: Space) -> dict[str, list[tuple[bytes | None, bytes | None, Any]]]:
    """By topic: (key, value, headers) of the records that name it."""
    kafka = space.settings.kafka
    partitions = [
        TopicPartition(f"{kafka.topic_prefix}{topic.name}", n) for topic in TOPICS for n in range(topic.partitions)
    ]
    results: dict[str, list[tuple[bytes | None, bytes | None, Any]]] = {}
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, max_partition_fetch_bytes=2**25)
    await consumer.start()
    try:
        consumer.assign(partitions)
        await consumer.seek_to_beginning()
        ends = await consumer.end_offsets(partitions)
        while any([await consumer.position(p) < end for p, end in ends.items()]):
            for p, records in (await consumer.getmany(timeout_ms=200)).items():
                for r in records:
                    if NAME.encode() in (r.key or b"") + (r.value or b"") + repr(r.headers).encode():
                        results.setdefault(p.topic.removeprefix(kafka.topic_prefix), []).append(
                            (r.key, r.value, r.headers)
                        )
        return results
    finally:
        await stop_consumer(consumer)


async def let_expire(space: Space) -> None:
    """As their retention does in time: what stands in topics that are not compacted goes."""
    kafka = space.settings.kafka
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.delete_records(
            {
                TopicPartition(f"{kafka.topic_prefix}{topic.name}", n): RecordsToDelete(-1)
                for topic in TOPICS
                if topic.cleanup == "delete"
                for n in range(topic.partitions)
            }
        )
    finally:
        await admin.close()


async def assert_forgotten(space: Space) -> None:
    assert await in_postgres(space) == set()
    assert await in_elasticsearch(space) == 0
    left = await in_kafka(space)
    await let_expire(space)
    bounded = await in_kafka(space)
    assert left.keys() > bounded.keys() == {"identities.v1"}
    key, value, headers = bounded["identities.v1"][-1]
    assert key == f"acme/hr/{PERSON}".encode()
    assert value is None, "compaction takes the key out"
    assert TOMBSTONE in headers


@pytest.fixture
def operator(space: Space) -> Iterator[Space]:
    """The commands log in as the operator's role, the workers as the owner. They start afterwards: grants lock tables,
    and fail while workers use them."""
    admin = space.settings.postgres.dsn.get_secret_value()
    define_roles(admin)
    start_workers(space)
    with logins(admin) as dsns:
        space.environment["PENSTOCK_POSTGRES_DSN"] = dsns["penstock_operator"]
        yield space


async def test_a_forgotten_document_and_person_remain_in_no_store(operator: Space) -> None:
    space = operator
    jane = await plant(space)
    before = await in_postgres(space)
    assert {"documents", "answer_reviews", "dead_letters", "chunks_g1", "access_sets", "eval_judgements"} <= before
    assert len(before) >= 20
    assert await in_elasticsearch(space) == 2
    code, output = await space.penstock("export", PERSON, "--tenant", "acme")
    assert code == 0
    assert {"memberships", "conversation_pairs", "answer_feedback", "answer_reviews", "connector_items"} <= output[
        "postgres"
    ].keys()
    assert output["postgres"]["memberships"][0]["principal"] == PERSON

    code, output = await space.penstock("forget", "document", jane.external_id, "--tenant", "acme", "--json")
    assert (code, output) == (1, {"done": False}), "nobody said --yes"
    assert await in_postgres(space) == before
    code, output = await space.penstock("forget", "document", jane.external_id, "--tenant", "acme", "--yes", "--json")
    assert code == 0
    assert output["done"]
    assert output["erased"]["postgres documents"] == 1
    left = {"Kafka documents.live.v1", "Kafka dead-letters.v1", "backups of Postgres", "Postgres webhook_deliveries"}
    left.add("Kafka conversations.live.v1")  # with the answers that were made from it
    assert left <= {entry["where"] for entry in output["remains"] if entry["until"]}
    await space.execute(  # left by a command that was cut off
        "INSERT INTO access_sets (tenant, digest, acl_tags, required_tags) VALUES ('acme', 'x', %s, '{}')", [NAME]
    )
    code, output = await space.penstock("forget", "document", jane.external_id, "--tenant", "acme", "--yes", "--json")
    assert (code, output["already_erased"], output["erased"].get("postgres documents")) == (0, True, None)
    [(made,)] = await space.query("SELECT answer_id FROM answer_provenance")
    late = Pair(question="Who is ill?", answer=f"{NAME} is.", asked_at=now(), answer_id=made)
    said = {"tenant": "acme", "source": "chat", "member": "ada", "conversation": "late"}
    await space.publish(ConversationRecorded(**said, observed_at=now(), pairs=[late]), topic=CONVERSATIONS)
    other = Pair(question="Who is kind?", answer="All are.", asked_at=now())
    await space.publish(ConversationRecorded(**said, observed_at=now(), pairs=[other]), topic=CONVERSATIONS)
    await space.until("SELECT count(*) = 1 FROM conversation_pairs WHERE member = 'ada'")
    assert await space.query("SELECT question FROM conversation_pairs WHERE member = 'ada'") == [("Who is kind?",)]
    await space.execute(  # by a key that was removed since
        "INSERT INTO eval_queries (id, tenant, text, principals, tags, givers)"
        " VALUES (gen_random_uuid(), 'acme', 'rules', '{}', '{}', '{x}')"
    )
    code, output = await space.penstock("forget", "person", PERSON, "--tenant", "acme", "--yes", "--json")
    assert code == 0
    assert output["erased"]["postgres memberships"] == 1
    [unknown] = [entry for entry in output["remains"] if entry["where"] == "Postgres eval_queries"]
    assert unknown["why"].startswith("1 golden questions that were promoted from feedback")
    assert {"Postgres answer_reviews", "Postgres query_use"} <= {e["where"] for e in output["remains"] if e["until"]}
    await assert_forgotten(space)
    assert await space.query("SELECT count(*) FROM person_floors WHERE tenant = 'acme'") == [(1,)]
    assert await space.query(
        "SELECT count(*) FROM documents WHERE external_id = 'rules.md' AND deleted_at IS NULL"
    ) == [(1,)]
    assert await space.query("SELECT consumed FROM (SELECT count(*) AS consumed FROM dead_letters) d") == [(0,)], (
        "the tombstone is no dead letter"
    )
    await space.publish(jane)  # from Kafka once more: it stays deleted
    again = jane.model_copy(update={"observed_at": now(), "version": 2})
    await space.publish(again)
    await space.settled([again])
    assert await space.query("SELECT count(*) FROM dead_letters") == [(0,)], "a tombstone of ours is none"
    alive = await space.query("SELECT external_id, title FROM documents WHERE deleted_at IS NULL ORDER BY external_id")
    assert alive == [("rules.md", "rules.md"), (jane.external_id, jane.title)], "a later event makes it anew"


@pytest.mark.slow
async def test_forget_signs_its_records_where_only_signed_ones_are_accepted(space: Space) -> None:
    """The command signs with its own key: what it withdraws, the empty set of groups and the tombstone."""
    key = space.home / "forget.pem"
    key.write_bytes(new_private_key())
    public = public_key_of(key.read_bytes())
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        await producers.add(connection, "operator", ("acme/*",), key_id(public), public, since=None, until=None)
    space.environment |= {"PENSTOCK_KAFKA_SIGNING_KEY_FILE": str(key), "PENSTOCK_PRODUCERS": "enforce"}
    space.start("detect", "vectors", "keywords")
    jane = written(f"{NAME}.md", f"About {NAME}.", author=PERSON)
    member = IdentityChanged(tenant="acme", source="hr", principal=PERSON, groups=["staff"], observed_at=now())
    async with producer(space.settings.kafka.model_copy(update={"signing_key_file": str(key)})) as kafka:
        await deliver([kafka.send(DOCUMENTS_LIVE, jane), kafka.send(IDENTITIES, member)])
    await space.settled([jane])
    await space.until("SELECT count(*) = 1 FROM memberships")
    for subject, name in (("person", PERSON), ("document", jane.external_id)):
        code, output = await space.penstock("forget", subject, name, "--tenant", "acme", "--yes", "--json")
        assert (code, output["done"]) == (0, True)
    await space.until("SELECT count(*) = 0 FROM memberships")
    assert await space.query("SELECT deleted_at IS NOT NULL, author, erased_at IS NOT NULL FROM documents") == [
        (True, None, True)
    ]
    again = IdentityChanged(tenant="acme", source="hr", principal="bob", groups=["staff"], observed_at=now())
    async with producer(space.settings.kafka.model_copy(update={"signing_key_file": str(key)})) as kafka:
        await deliver([kafka.send(IDENTITIES, again)])
    await space.until("SELECT count(*) = 1 FROM memberships")  # so the tombstones before it were handled
    assert await space.query("SELECT code FROM dead_letters") == []


@pytest.mark.slow
async def test_nothing_of_a_forgotten_tenant_remains_and_other_tenants_are_untouched(operator: Space) -> None:
    space = operator
    await plant(space)
    other = written("kept.md", "of somebody else").model_copy(update={"tenant": "globex"})
    await space.publish(other)
    await space.settled([other])
    space.stop("detect")
    await space.publish(other.model_copy(update={"observed_at": now() + timedelta(minutes=3), "version": 2}))
    forget = ("forget", "document", "kept.md", "--tenant", "globex", "--yes", "--json", "--wait", "60")
    forgetting = asyncio.create_task(space.penstock(*forget))
    await space.until("SELECT count(*) = 1 FROM connector_sources WHERE tenant = 'globex'")  # the delete has its stamp
    space.start("detect", env={"PENSTOCK_POSTGRES_DSN": space.settings.postgres.dsn.get_secret_value()})
    with pytest.raises(AssertionError, match="changed meanwhile"):
        await forgetting
    assert await space.query(
        "SELECT title, text FROM documents d JOIN document_bodies b ON b.document_id = d.id WHERE tenant = 'globex'"
    ) == [("kept.md", "of somebody else")], "a living document is not touched"
    code, output = await space.penstock("forget", "tenant", "acme", "--yes", "--json")
    assert code == 0
    assert output["erased"]["postgres documents"] == 2
    await assert_forgotten(space)
    assert await space.query("SELECT tenant FROM documents WHERE deleted_at IS NULL") == [("globex",)]
    floors = await space.query("SELECT DISTINCT tenant FROM membership_floors")
    assert floors == [("acme",)], "records of before change nothing"


@pytest.mark.slow
async def test_a_tenant_is_forgotten_while_a_worker_publishes_its_canaries(operator: Space) -> None:
    """The erasure began with a canary, which was published again in between, and ended before any other document."""
    space = operator
    for tenant, source in (("acme", "wiki"), ("globex", "hr")):
        await space.execute("INSERT INTO connectors (tenant, source, kind) VALUES (%s, %s, 'folder')", tenant, source)
    await plant(space)
    owner = {"PENSTOCK_POSTGRES_DSN": space.settings.postgres.dsn.get_secret_value()}
    await asyncio.to_thread(space.start, "canary", env={**owner, "PENSTOCK_CANARY_EVERY_SECONDS": "1"})
    await space.until("SELECT count(*) = 3 FROM documents WHERE starts_with(source, 'canary.')")
    code, output = await space.penstock("forget", "tenant", "acme", "--yes", "--json")
    assert code == 0
    assert output["erased"]["postgres documents"] == 4
    await assert_forgotten(space)
    await asyncio.sleep(5)
    left = "SELECT DISTINCT tenant FROM documents WHERE erased_at IS NULL OR access_id IS NOT NULL"
    assert await space.query(left) == [("globex",)]
    assert await space.query("SELECT DISTINCT tenant FROM access_sets") == [("globex",)]


@pytest.mark.slow
async def test_a_canary_that_does_not_end_keeps_nothing_else_of_a_forgotten_tenant(operator: Space) -> None:
    """A canary that the settings name goes on, and so does that of the pipeline where no connector is known. The
    tenant's conversations, reviews and golden questions stayed, however often the command was run."""
    space = operator
    await plant(space)

    async def canary() -> None:
        while True:
            round_ = written("canary", "Canary", acl_tags=["user:penstock-canary"])
            await space.publish(round_.model_copy(update={"source": "canary.hr", "version": time.time_ns()}))
            await asyncio.sleep(0.3)

    going_on = asyncio.create_task(canary())
    try:
        await space.until("SELECT count(*) = 1 FROM documents WHERE source = 'canary.hr'")
        with pytest.raises(AssertionError, match=r"source canary\.hr"):
            await space.penstock("forget", "tenant", "acme", "--yes", "--json", "--wait", "20")
    finally:
        await cancel_and_wait([going_on])
    await assert_forgotten(space)


@pytest.mark.slow
async def test_a_forgotten_authors_name_is_removed_from_all_their_documents(working: Space) -> None:
    """It stayed in the keyword index with all of their documents but the first."""
    space = working
    works = [written(f"{n}.md", f"Rule {n}: be kind.", author=PERSON) for n in range(3)]
    await space.publish(*works)
    await space.settled(works)
    assert await in_elasticsearch(space) == 3
    code, output = await space.penstock("forget", "person", PERSON, "--tenant", "acme", "--yes", "--json")
    assert (code, output["erased"]["postgres documents"], output["erased"]["elasticsearch documents"]) == (0, 3, 3)
    assert await in_elasticsearch(space) == 0
    assert await in_postgres(space) == set()


@pytest.mark.slow
async def test_a_person_is_forgotten_completely_by_a_run_after_one_that_ended_in_the_middle(working: Space) -> None:
    """The conversations were erased first, and nobody knew any more whose answers a golden question was made from."""
    space = working
    rules = written("rules.md", "Be kind to each other.", author=PERSON)
    answer, said = uuid4(), {"tenant": "acme", "source": "chat", "member": PERSON, "conversation": "c"}
    pair = Pair(question=f"Where is {NAME}?", answer=f"{NAME} is ill.", asked_at=now(), answer_id=answer)
    await space.publish(rules)
    await space.publish(ConversationRecorded(**said, observed_at=now(), pairs=[pair]), topic=CONVERSATIONS)
    await space.settled([rules])
    await space.until("SELECT count(*) = 1 FROM conversation_mentions")
    await space.execute(
        "INSERT INTO eval_queries (id, tenant, text, principals, tags, answers)"
        " VALUES (gen_random_uuid(), 'acme', %s, '{}', '{}', %s)",
        f"Where is {NAME}?",
        [answer],
    )
    space.stop("keywords")
    forget = ("forget", "person", PERSON, "--tenant", "acme", "--yes", "--json")
    with pytest.raises(AssertionError, match="the documents that named the person: not complete"):
        await space.penstock(*forget, "--wait", "2")
    code, output = await space.penstock(*forget)
    assert (code, await in_postgres(space)) == (0, set())
    assert await in_elasticsearch(space) == 1
    [pending] = [entry["why"] for entry in output["remains"] if entry["where"] == "Elasticsearch"]
    assert pending.startswith("1 documents whose entries are yet to be written anew")
    code, output = await space.penstock(*forget)  # what is left is in Elasticsearch alone
    assert (code, output["erased"], output.get("unknown", False)) == (0, {}, False)
    space.start("keywords")
    await space.settled([rules])
    code, output = await space.penstock(*forget)
    assert (code, output["unknown"]) == (0, True)
    assert "Elasticsearch" not in {entry["where"] for entry in output["remains"]}
    assert await in_elasticsearch(space) == 0


@pytest.mark.slow
async def test_feedback_on_a_document_is_forgotten_by_a_run_after_one_that_ended_in_the_middle(working: Space) -> None:
    """Once the deletion was accepted, nobody knew any more on whose passages it was; and once the answers made from the
    document were erased, on whose answers."""
    space = working
    jane = written(f"{NAME}.md", f"About {NAME}.")
    await space.publish(jane)
    await space.settled([jane])
    [(id_, chunk)] = await space.query("SELECT document_id, chunk_ids[1] FROM manifests")
    answer = uuid4()
    await space.execute(
        "INSERT INTO answer_reviews (answer_id, tenant, question, mode, model, support, density, reasons, documents,"
        " chunks) VALUES (%s, 'acme', %s, 'm', 'm', 0, 0, '{}', %s, '{}')",
        answer,
        f"Where is {NAME}?",
        [id_],
    )
    for subject, about in (("answer_id", answer), ("chunk_id", chunk)):
        await space.execute(
            f"INSERT INTO answer_feedback (tenant, giver, subject, {subject}, query, verdict)"
            " VALUES ('acme', 'x', %s, %s, %s, 'up')",
            subject.encode(),
            about,
            NAME,
        )
    space.stop("keywords")
    forget = ("forget", "document", jane.external_id, "--tenant", "acme", "--yes", "--json")
    with pytest.raises(AssertionError, match="the document's deletion: not complete"):
        await space.penstock(*forget, "--wait", "2")
    space.start("keywords")
    await space.until("SELECT count(*) = 0 FROM index_state WHERE seq < want_seq")
    await space.execute(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no space left'; END $$"
    )
    await space.execute("CREATE TRIGGER fails BEFORE DELETE ON uploads EXECUTE FUNCTION fail()")
    with pytest.raises(AssertionError, match="erasure"):
        await space.penstock(*forget)
    assert "answer_reviews" not in await in_postgres(space)
    await space.execute("DROP TRIGGER fails ON uploads")
    code, output = await space.penstock(*forget)
    assert (code, output["erased"]["postgres documents"], await in_postgres(space)) == (0, 1, set())
    code, output = await space.penstock(*forget)
    assert (code, output["already_erased"], output["erased"]) == (0, True, {})


async def test_a_forgotten_persons_name_is_removed_from_metadata_and_other_values_stay(operator: Space) -> None:
    """As an assignee or a participant it stayed in both stores, and filters found it."""
    space = operator
    async with open_pool(space.settings.postgres) as pool, pool.connection() as connection:
        await metadata_keys.declare(connection, "acme", "participants", "keyword")
        await metadata_keys.declare(connection, "acme", "assignee", "keyword")
    people = [PERSON, "ada"]
    named = written("a.md", "Rule a: be kind.", metadata={"assignee": PERSON, "participants": people, "priority": 2})
    alone = written("b.md", "Rule b: be kind.", metadata={"participants": [PERSON], "owner": PERSON, "empty": None})
    other = written("c.md", "Rule c: be kind.", metadata={"participants": ["ada"]})
    await space.publish(named, alone, other)
    await space.settled([named, alone, other])
    assert await in_elasticsearch(space) == 2
    code, exported = await space.penstock("export", PERSON, "--tenant", "acme")
    assert (code, {*exported["postgres"]} - {"trail.records"}) == (0, {"documents", "document_bodies"})
    assert all("text" not in row for row in exported["postgres"]["document_bodies"])
    code, output = await space.penstock("forget", "person", PERSON, "--tenant", "acme", "--yes", "--json")
    assert (code, output["erased"]["postgres documents"], output["erased"]["elasticsearch documents"]) == (0, 2, 2)
    assert await in_elasticsearch(space) == 0
    assert await in_postgres(space) == set()
    assert await space.query(
        "SELECT external_id, keys, metadata FROM documents d JOIN document_bodies b ON b.document_id = d.id ORDER BY 1"
    ) == [
        ("a.md", ["participants=ada"], {"participants": ["ada"], "priority": 2}),
        ("b.md", [], {"empty": None}),
        ("c.md", ["participants=ada"], {"participants": ["ada"]}),
    ]


@pytest.mark.parametrize("subject", ["document", "source"])
@pytest.mark.slow
async def test_references_to_a_document_are_forgotten_after_its_row_expired_by_retention(
    operator: Space, subject: str
) -> None:
    """ "Already erased" was said, and answers made from it, golden questions and dead letters went on naming it."""
    space = operator
    jane = await plant(space)
    gone = DocumentDeleted(tenant="acme", source="hr", external_id=jane.external_id, observed_at=now())
    await space.publish(gone)
    await space.settled([gone])
    await space.execute(
        "UPDATE documents SET announced_seq = seq, deleted_at = %s WHERE deleted_at IS NOT NULL",
        now() - timedelta(days=31),
    )
    await space.execute("DELETE FROM connector_items")  # as by age, too
    async with open_pool(space.settings.postgres) as pool, asyncio.timeout(60):
        while await space.query("SELECT count(*) FROM documents WHERE erased_at IS NOT NULL") != [(1,)]:
            await Retention(pool, Metrics(), RetentionSettings()).turn()
    assert {"eval_judgements", "dead_letters", "conversation_pairs"} <= await in_postgres(space)
    name = jane.external_id if subject == "document" else "hr"
    code, output = await space.penstock("forget", subject, name, "--tenant", "acme", "--yes", "--json")
    assert (code, output["done"], output.get("already_erased", False)) == (0, True, subject == "document")
    assert await space.query(
        "SELECT (SELECT count(*) FROM dead_letters), (SELECT count(*) FROM eval_judgements WHERE external_id = %s),"
        " (SELECT count(*) FROM conversation_pairs WHERE member = 'ada'), (SELECT count(*) FROM superseded)",
        jane.external_id,
    ) == [(0, 0, 0, 0)]
