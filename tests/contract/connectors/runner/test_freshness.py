"""Up to which time a source is recorded as complete: never later than its stores are, whatever is lost or restarted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pytest
import pytest_asyncio

from connectors import operate
from connectors.operate import unapplied_token
from connectors.runner import freshness
from connectors.runner.freshness import Freshness, Listing
from connectors.runner.instance import Instance
from connectors.runner.rows import Holder
from pipeline.core import publication
from pipeline.core.fold import State, fold
from pipeline.core.identity import document_id, qualify
from tests.support.connectors.runner_kit import Bench
from tests.support.pipeline.folded import event_of
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted, IdentityChanged

pytestmark = pytest.mark.stack

GENERATION = "freshness"
Seen = tuple[str, tuple[str, ...]] | None
"""A document in the stores: its text and who may read it; None: nothing."""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freshness, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(freshness, "REST_FACTOR", 1)


@dataclass
class Pipeline:
    """Detect and the sinks, one step after another."""

    bench: Bench
    waiting: list[Any] = field(default_factory=list)
    """Messages in Kafka that detect has not read."""
    states: dict[str, State] = field(default_factory=dict)
    shown: dict[str, Seen] = field(default_factory=dict)
    """The contents of the stores."""

    async def receive(self) -> None:
        self.waiting += await self.bench.take()

    async def accept(self, message: Any) -> None:
        """Accept one message, and make its document pending if that changes it."""
        if isinstance(message, IdentityChanged):
            await self.bench.query(
                "INSERT INTO memberships AS m VALUES (%s, %s, %s, %s, %s) ON CONFLICT (tenant, principal, source)"
                " DO UPDATE SET groups = EXCLUDED.groups, observed_at = EXCLUDED.observed_at"
                " WHERE EXCLUDED.observed_at >= m.observed_at",
                self.bench.tenant,
                self.bench.name,
                message.principal,
                message.groups,
                message.observed_at,
            )
            return
        name = message.external_id
        step = fold(self.states.get(name, State()), event_of(message))
        self.states[name] = state = step.state
        id_ = document_id(self.bench.tenant, self.bench.name, name)
        tags = list(qualify(self.bench.name, state.acl_tags))
        async with self.bench.pool.connection() as connection:
            cursor = await connection.execute(
                "INSERT INTO access_sets AS a (tenant, digest, acl_tags, required_tags) VALUES (%s, %s, %s, '{}')"
                " ON CONFLICT (tenant, digest) DO UPDATE SET digest = a.digest RETURNING id",
                [self.bench.tenant, sha256(repr(tags).encode()).digest(), tags],
            )
            [[access_id]] = await cursor.fetchall()
            await connection.execute(
                "INSERT INTO documents AS d (id, tenant, source, external_id, version, observed_at, deleted_floor,"
                " deleted_at, access_observed_at, access_id, seq)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, nextval('ledger_seq'))"
                " ON CONFLICT (id) DO UPDATE SET version = EXCLUDED.version, observed_at = EXCLUDED.observed_at,"
                " deleted_floor = EXCLUDED.deleted_floor, deleted_at = EXCLUDED.deleted_at,"
                " access_observed_at = EXCLUDED.access_observed_at, access_id = EXCLUDED.access_id,"
                " seq = EXCLUDED.seq",
                [
                    id_,
                    self.bench.tenant,
                    self.bench.name,
                    name,
                    state.version,
                    state.observed_at,
                    state.deleted_floor,
                    state.deleted_at,
                    state.access_observed_at,
                    access_id,
                ],
            )
            if step.changes:
                await connection.execute(
                    "INSERT INTO index_state AS s (document_id, generation, store, want_seq)"
                    " SELECT %s, %s, store, currval('ledger_seq') FROM unnest(ARRAY['vectors', 'keywords']) store"
                    " ON CONFLICT (document_id, generation, store) DO UPDATE SET want_seq = EXCLUDED.want_seq,"
                    " pending_since = CASE WHEN s.seq < s.want_seq THEN s.pending_since ELSE clock_timestamp() END",
                    [id_, GENERATION],
                )

    async def settle(self, name: str) -> None:
        """Both stores reach what the ledger wants of a document."""
        state = self.states[name]
        self.shown[name] = (
            ((state.content_hash or b"").decode(), tuple(sorted(state.acl_tags))) if state.alive else None
        )
        await self.bench.query(
            "UPDATE index_state SET seq = want_seq WHERE document_id = %s",
            document_id(self.bench.tenant, self.bench.name, name),
        )

    async def finish(self) -> None:
        await self.receive()
        while self.waiting:
            await self.accept(self.waiting.pop(0))
        for name in self.states:
            await self.settle(name)

    async def handled(self) -> None:
        """As the detect worker notes it: everything that was sent until now has been handled."""
        await self.bench.query(
            "INSERT INTO handled SELECT stage, clock_timestamp() FROM unnest(ARRAY['detect', 'identities']) stage"
            " ON CONFLICT (stage) DO UPDATE SET until = EXCLUDED.until"
        )

    async def certificate(self) -> dict[str, Any]:
        names = "complete_until, access_until, groups_until, listed_at, has_gaps, generation, reopened_at"
        rows = await self.bench.mine(names, "connector_freshness")
        return dict(zip(names.split(", "), rows[0], strict=True)) if rows else dict.fromkeys(names.split(", "))


@pytest_asyncio.fixture(loop_scope="session")
async def pipeline(bench: Bench) -> AsyncIterator[Pipeline]:
    await bench.query(
        "INSERT INTO generations (name, state, model, revision, dimensions, input_window, params, chunk_table,"
        " keyword_index) VALUES (%s, 'active', 'm', 'r', 1, 1, '{}', 't', 'i')",
        GENERATION,
    )
    yield Pipeline(bench)
    await bench.query("DELETE FROM index_state WHERE generation = %s", GENERATION)
    await bench.query("DELETE FROM generations WHERE name = %s", GENERATION)


@asynccontextmanager
async def compared(pipeline: Pipeline, **times: float) -> AsyncIterator[Instance]:
    """A runner whose first load is applied and was compared with the ledger."""
    async with pipeline.bench.loaded(**times) as instance:
        pipeline.waiting += pipeline.bench.taken
        await pipeline.finish()
        await pipeline.handled()
        await pipeline.bench.ask("reconcile")
        yield instance


async def completed(pipeline: Pipeline, since: datetime) -> dict[str, Any]:
    """The certificate, once it names a time after ``since``."""
    async with asyncio.timeout(20):
        while True:
            certificate = await pipeline.certificate()
            if (until := certificate["complete_until"]) is not None and until > since:
                return certificate
            await asyncio.sleep(0.05)


async def looked(instance: Instance) -> None:
    """Wait until the runner has looked a few more times."""
    del instance
    await asyncio.sleep(0.6)


async def test_a_source_is_complete_once_both_stores_have_what_a_listing_showed(pipeline: Pipeline) -> None:
    bench = pipeline.bench
    bench.world.fill(5)
    bench.world.groups["staff"] = {"ann"}, set()
    async with compared(pipeline) as instance:
        bench.world.write("d001", "edited")
        edited = datetime.now(UTC)
        await bench.ask("sweep")
        await bench.ask("groups")
        await looked(instance)
        assert ((await pipeline.certificate())["complete_until"] or edited) <= edited, "Kafka has it, and nobody else"
        await pipeline.receive()
        while pipeline.waiting:
            await pipeline.accept(pipeline.waiting.pop(0))
        await looked(instance)
        assert ((await pipeline.certificate())["complete_until"] or edited) <= edited, "the stores do not have it"
        await pipeline.settle("d001")
        certificate = await completed(pipeline, edited)
        assert certificate["complete_until"] <= datetime.now(UTC)
        assert certificate["access_until"] == certificate["complete_until"]
        assert certificate["groups_until"] > edited
        assert certificate["generation"] == GENERATION
        assert not certificate["has_gaps"]


async def known(pipeline: Pipeline) -> Freshness:
    """The freshness of a source whose runner has recorded everything from the beginning."""
    bench = pipeline.bench
    await bench.query(
        "INSERT INTO connectors (tenant, source, kind, epoch) VALUES (%s, %s, 'world', 1)", bench.tenant, bench.name
    )
    recorded = Freshness(bench.pool, Holder(bench.tenant, bench.name, 1), every_seconds=60.0)
    await recorded.begin()
    await recorded.equals_ledger(datetime.max.replace(tzinfo=UTC))
    return recorded


async def test_a_document_in_doubt_holds_the_time_back(pipeline: Pipeline) -> None:
    bench, recorded = pipeline.bench, await known(pipeline)
    await bench.query(
        "INSERT INTO connector_items (tenant, source, scope, external_id, in_doubt_since)"
        " VALUES (%s, %s, '', 'd', now())",
        bench.tenant,
        bench.name,
    )
    recorded.listed("documents", Listing(await recorded.now()))
    await recorded.look()
    assert (await pipeline.certificate())["complete_until"] is None
    await bench.query("UPDATE connector_items SET in_doubt_since = NULL WHERE tenant = %s", bench.tenant)
    await recorded.look()
    assert (await pipeline.certificate())["complete_until"] is not None


async def test_groups_that_the_ledger_lacks_hold_the_time_back(pipeline: Pipeline) -> None:
    bench, recorded = pipeline.bench, await known(pipeline)
    await bench.query(
        "INSERT INTO connector_principals (tenant, source, principal, digest, observed_at)"
        " VALUES (%s, %s, 'ann', 'd', now())",
        bench.tenant,
        bench.name,
    )
    recorded.listed("groups", Listing(await recorded.now()))
    await recorded.look()
    assert (await pipeline.certificate())["groups_until"] is None
    await bench.query(
        "INSERT INTO memberships SELECT tenant, source, principal, '{}', observed_at FROM connector_principals"
        " WHERE tenant = %s",
        bench.tenant,
    )
    await recorded.look()
    assert (await pipeline.certificate())["groups_until"] is not None


async def test_a_listing_without_revisions_verifies_access_alone(pipeline: Pipeline) -> None:
    bench = pipeline.bench
    bench.world.write("d000", revision=None)
    async with compared(pipeline):
        await bench.ask("sweep")
        async with asyncio.timeout(20):
            while (certificate := await pipeline.certificate())["access_until"] is None:
                await asyncio.sleep(0.05)
    assert certificate["complete_until"] is None


async def test_after_a_runner_that_recorded_nothing_the_ledger_is_compared_first(pipeline: Pipeline) -> None:
    bench = pipeline.bench
    await known(pipeline)
    later = Freshness(bench.pool, Holder(bench.tenant, bench.name, 3), every_seconds=60.0)
    await later.begin()
    later.listed("documents", Listing(await later.now()))
    await later.look()
    assert (await pipeline.certificate())["complete_until"] is None
    await later.equals_ledger(datetime.max.replace(tzinfo=UTC))
    await later.look()
    assert (await pipeline.certificate())["complete_until"] is not None


async def test_after_a_cut_over_the_other_stores_have_to_settle_first(pipeline: Pipeline) -> None:
    bench, recorded = pipeline.bench, await known(pipeline)
    recorded.listed("documents", Listing(await recorded.now()))
    await recorded.look()
    first = (await pipeline.certificate())["complete_until"]
    assert first is not None
    await bench.query("UPDATE connector_freshness SET generation = 'before' WHERE tenant = %s", bench.tenant)
    await bench.query(
        "INSERT INTO documents (id, tenant, source, external_id) VALUES (%s, %s, %s, 'd')",
        document_id(bench.tenant, bench.name, "d"),
        bench.tenant,
        bench.name,
    )
    await bench.query(
        "INSERT INTO index_state (document_id, generation, store, want_seq) VALUES (%s, %s, 'vectors', 1)",
        document_id(bench.tenant, bench.name, "d"),
        GENERATION,
    )
    recorded.listed("documents", Listing(await recorded.now()))
    await recorded.look()
    assert (await pipeline.certificate())["complete_until"] == first
    await bench.query("UPDATE index_state SET seq = want_seq WHERE generation = %s", GENERATION)
    await recorded.look()
    certificate = await pipeline.certificate()
    assert certificate["complete_until"] > first
    assert certificate["generation"] == GENERATION


async def test_the_token_of_a_connector_names_what_was_published_until_both_stores_have_it(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = pipeline.bench
    bench.world.fill(3)
    async with compared(pipeline) as instance:
        await applied(pipeline, instance)
        bench.world.write("d000", "edited")
        bench.world.silently("d001", acl_tags=["board"])
        bench.world.write("d002", "edited, and then deleted")
        await bench.ask("sweep")
        bench.world.remove("d002")
        await bench.ask("sweep")
        await pipeline.receive()
        expected = set()
        for message in pipeline.waiting:
            id_ = document_id(bench.tenant, bench.name, message.external_id)
            match message:
                case DocumentUpserted(external_id="d000"):
                    expected.add(publication.content(id_, message.version))
                case AccessChanged():
                    expected.add(publication.access(id_, message.observed_at))
                case DocumentDeleted():
                    expected.add(publication.deletion(id_, message.observed_at))
        token = await unapplied_token(bench.pool, instance.plan)
        assert token is not None
        assert set(publication.publications_of(token)) == expected
        assert {change.kind for change in expected} == {"content", "access", "deletion"}

        monkeypatch.setattr(operate, "MAX_PUBLICATIONS", 2)
        assert await unapplied_token(bench.pool, instance.plan) is None, "one token cannot name as many"
        monkeypatch.undo()
        await bench.query("UPDATE connector_publications SET version = NULL WHERE tenant = %s", bench.tenant)
        assert await unapplied_token(bench.pool, instance.plan) is None, "recorded before there were versions"
        await pipeline.finish()
        await applied(pipeline, instance)


async def applied(pipeline: Pipeline, instance: Instance) -> None:
    """Wait until nothing that the instance has published waits for a store."""
    async with asyncio.timeout(20):
        while await unapplied_token(pipeline.bench.pool, instance.plan) != publication.token([]):
            await asyncio.sleep(0.05)
