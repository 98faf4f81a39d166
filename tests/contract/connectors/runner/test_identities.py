"""Memberships from a source to ``identities.v1``, on real Kafka and Postgres, while either end fails."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from connectors.clock import Clock
from connectors.runner.identities import Identities
from connectors.runner.membership import (
    MAX_INTERRUPTION,
    GroupMembers,
    MembershipTables,
    digest,
    merge_listing,
    tags_by_principal,
)
from connectors.runner.rows import Holder, LeaseLost, Rows
from connectors.source import Context, Cursor, CursorExpired, Group, GroupPage, Reaction
from pipeline.core.errors import Retryable
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores.postgres import Pool, open_pool
from tests.support.connectors.runner_kit import Bench, Ground, bench_on
from tests.support.connectors.runner_world import World, WorldSource
from topics.messages import IdentityChanged

pytestmark = pytest.mark.stack


@asynccontextmanager
async def digest_writes_refused(bench: Bench) -> AsyncIterator[None]:
    """Postgres fails each time when somebody wants to record that a set of tags has been published."""
    await bench.query(
        "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'the server is going away' USING ERRCODE = '57P01'; END $$"
    )
    await bench.query(
        "CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON connector_principals FOR EACH ROW"
        f" WHEN (NEW.digest <> '' AND NEW.tenant = '{bench.tenant}') EXECUTE FUNCTION refuse()"
    )
    try:
        yield
    finally:
        await bench.query("DROP TRIGGER refuse ON connector_principals")


async def until_published(bench: Bench, principal: str, groups: list[str]) -> None:
    async with asyncio.timeout(60):
        while not any(
            isinstance(message, IdentityChanged) and (message.principal, message.groups) == (principal, groups)
            for message in await bench.take()
        ):
            await asyncio.sleep(0.05)


async def newest(bench: Bench, memberships: dict[str, IdentityChanged]) -> dict[str, list[str]]:
    """principal → groups as the ledger keeps them: by the greatest stamp. memberships: of all messages so far."""
    for message in await bench.take():
        if isinstance(message, IdentityChanged):
            last = memberships.get(message.principal)
            if last is None or message.observed_at > last.observed_at:
                memberships[message.principal] = message
    return {principal: message.groups for principal, message in memberships.items()}


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_member_who_left_before_its_membership_was_recorded_loses_the_group(
    bench: Bench, restarted: bool
) -> None:
    bench.world.groups = {"hr": ({"ann"}, set())}
    async with bench.loaded() as instance, digest_writes_refused(bench):
        bench.world.groups["hr"][0].add("eve")
        await instance.react(Reaction(groups=["hr"]))
        instance.activities["groups"].trigger()
        await until_published(bench, "eve", ["hr"])
        if not restarted:
            bench.world.groups["hr"][0].discard("eve")
            await until_published(bench, "eve", [])
            return
    bench.world.groups["hr"][0].discard("eve")
    async with bench.running():
        await until_published(bench, "eve", [])


async def test_a_principal_missing_from_all_group_listings_holds_no_groups(bench: Bench) -> None:
    """Also when what was published last could not be recorded, and a listing of one group is all that follows."""
    bench.world.groups = {"hr": ({"ann"}, set()), "board": ({"ann"}, set())}
    async with bench.loaded() as instance:
        async with digest_writes_refused(bench):
            bench.world.groups = {"hr": ({"ann", "eve"}, set()), "board": (set(), set())}
            await instance.react(Reaction(groups=["hr"]))
            await until_published(bench, "eve", ["hr"])
            await instance.react(Reaction(groups=["board"]))
            await until_published(bench, "ann", ["hr"])
            bench.world.groups = {}
        await bench.ask("groups")
        memberships: dict[str, IdentityChanged] = {}
        assert await newest(bench, memberships) == {"ann": [], "eve": []}
        assert await bench.mine("count(*)", "connector_principals", "digest = ''") == [(0,)]


async def test_a_runner_that_lost_its_lease_publishes_no_membership(bench: Bench) -> None:
    """Another one takes over at the moment when the groups have been written."""
    await bench.query(
        "INSERT INTO connectors (tenant, source, kind, epoch) VALUES (%s, %s, 'world', 1)", bench.tenant, bench.name
    )
    await bench.query(
        "CREATE FUNCTION take_over() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN UPDATE connectors"
        " SET epoch = epoch + 1 WHERE (tenant, source) = (NEW.tenant, NEW.source); RETURN NEW; END $$"
    )
    await bench.query(
        "CREATE TRIGGER take_over AFTER INSERT ON connector_groups FOR EACH ROW EXECUTE FUNCTION take_over()"
    )
    bench.world.groups = {"hr": ({"ann"}, set())}
    try:
        with pytest.raises(LeaseLost):
            await reading(bench, Holder(bench.tenant, bench.name, 1)).read_all(frozenset())
    finally:
        await bench.query("DROP TRIGGER take_over ON connector_groups")
    assert await bench.take() == []


async def test_a_removed_group_is_published_by_a_runner_whose_clock_is_behind_its_predecessors(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner that saw the group was killed before it could publish anybody's set."""
    bench.world.groups = {"hr": ({"ann"}, set())}
    holder = Holder(bench.tenant, bench.name, 1)
    await bench.query(
        "INSERT INTO connectors (tenant, source, kind, epoch) VALUES (%s, %s, 'world', 1)", bench.tenant, bench.name
    )

    async def killed(*_: object) -> None:
        raise asyncio.CancelledError

    ahead = reading(bench, holder)
    ahead._clock.last = datetime.now(UTC) + timedelta(minutes=3)
    with monkeypatch.context() as patch:
        patch.setattr(MembershipTables, "in_doubt", killed)
        with pytest.raises(asyncio.CancelledError):
            await ahead.read_some(frozenset({"hr"}))
    del bench.world.groups["hr"]
    next_one = reading(bench, holder)
    next_one._clock = Clock(await Rows(bench.pool, holder).last_stamp())
    await next_one.read_all(frozenset())
    assert await newest(bench, {}) == {"ann": []}


PEOPLE, TAGS = ("ann", "bob", "cy", "dee"), ("t1", "t2", "t3", "t4", "t5")
holding = st.tuples(
    st.frozensets(st.sampled_from(PEOPLE), max_size=2),
    st.frozensets(st.sampled_from((*TAGS, "user:dee")), max_size=3),
)
Holding = tuple[frozenset[str], frozenset[str]]
Groups = dict[str, Holding | None]
Step = tuple[Groups, frozenset[str] | None]
"""A change at the source, and the tags that are listed after it (None: all of them)."""
CHAIN: Groups = {
    "t1": (frozenset({"ann"}), frozenset()),
    "t2": (frozenset({"bob"}), frozenset({"t1"})),
    "t3": (frozenset(), frozenset({"t2", "user:dee"})),
    "t4": (frozenset({"bob"}), frozenset({"t3"})),
}
steps = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(TAGS), st.none() | holding, max_size=2),
        st.none() | st.frozensets(st.sampled_from(TAGS), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=6,
)


def test_a_partial_listing_of_groups_has_the_same_effect_as_computing_all_tags(ground: Ground, tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        opened = bench_on(ground, tmp_path)
        bench = runner.run(opened.__aenter__())

        @settings(max_examples=30, deadline=None, database=None)
        @given(st.dictionaries(st.sampled_from(TAGS), holding, min_size=3), steps)
        @example(CHAIN, [({"t5": (frozenset(), frozenset({"t3"}))}, frozenset({"t5"}))])
        @example(CHAIN, [({"t4": (frozenset(), frozenset())}, frozenset({"t4"}))])
        def prove(first: Groups, then: list[Step]) -> None:
            runner.run(check_against_model(bench, [(first, None), *then]))

        try:
            prove()
        finally:
            runner.run(opened.__aexit__(None, None, None))


async def check_against_model(bench: Bench, steps: list[Step]) -> None:
    bench.tenant, bench.world = uuid.uuid4().hex, World()
    await bench.query(
        "INSERT INTO connectors (tenant, source, kind, epoch) VALUES (%s, %s, 'world', 1)", bench.tenant, bench.name
    )
    identities = reading(bench, Holder(bench.tenant, bench.name, 1))
    model: dict[str, GroupMembers] = {}
    for changed, requested_tags in steps:
        for tag, group in changed.items():
            bench.world.groups.pop(tag, None)
            if group is not None:
                bench.world.groups[tag] = (set(group[0]), set(group[1]))
        before, at = tags_by_principal(model), datetime.now(UTC)
        listed = [
            GroupMembers(tag, tuple(sorted(members)), tuple(sorted(of)), at)
            for tag, (members, of) in bench.world.groups.items()
            if requested_tags is None or tag in requested_tags
        ]
        model = merge_listing(model, listed, at, requested_tags)
        outcome = await (
            identities.read_all(frozenset()) if requested_tags is None else identities.read_some(requested_tags)
        )
        after = tags_by_principal(model)
        moved = [name for name in PEOPLE if before.get(name, frozenset()) != after.get(name, frozenset())]
        assert outcome["identities"] == len(moved)
        assert dict(await bench.mine("principal, digest", "connector_principals")) == {
            name: digest(after.get(name, ())) for (name,) in await bench.mine("principal", "connector_principals")
        }
        assert after.keys() <= {name for (name,) in await bench.mine("principal", "connector_principals")}
    published = await newest(bench, {})
    assert {name: groups for name, groups in published.items() if groups} == {
        name: sorted(tags) for name, tags in tags_by_principal(model).items()
    }


async def test_reading_one_of_20_000_groups_reads_few_rows(bench: Bench, ground: Ground) -> None:
    name = f"big-{uuid.uuid4().hex[:8]}"
    holder = Holder(bench.tenant, name, 1)
    await bench.query(
        "INSERT INTO connectors (tenant, source, kind, epoch) VALUES (%s, %s, 'world', 1)", *instance(holder)
    )
    await bench.query(
        "INSERT INTO connector_groups SELECT %s, %s, 'g' || n, ARRAY(SELECT 'p' || (n * 7 + k) %% 40000"
        " FROM generate_series(1, 10) k), CASE WHEN n > 10 AND n %% 10 = 0 THEN ARRAY['g' || n / 10] ELSE '{}' END,"
        " now() FROM generate_series(1, 20000) n",
        *instance(holder),
    )
    await bench.query(
        "INSERT INTO connector_principals SELECT %s, %s, 'p' || n, 'x', now() FROM generate_series(0, 39999) n",
        *instance(holder),
    )
    await bench.query("ANALYZE connector_groups, connector_principals")
    single = PostgresSettings(dsn=bench.postgres.dsn, pool_max_size=1)
    async with open_pool(single) as pool:
        tables = MembershipTables(pool, holder)
        before = await rows_read(pool)
        at = datetime.now(UTC)
        await tables.merge_groups([GroupMembers("g15000", ("p1", "p2"), (), at)], at, ["g15000"])
        assert [row.principal for row in await tables.in_doubt("", at)]
        assert await rows_read(pool) - before < 2_000


class PagedSource(WorldSource):
    """Lists one group on each page, and raises what is set before one of them."""

    error: Exception | None = None
    error_before = ""

    async def group_pages(self, cursor: Cursor | None) -> AsyncIterator[GroupPage]:
        for tag, (members, of) in sorted(self.world.groups.items()):
            if cursor is not None and tag <= cursor["after"]:
                continue
            if self.error is not None and tag == self.error_before:
                raise self.error
            self.world.history.append(tag)
            yield GroupPage([Group(tag, set(members), set(of))], {"after": tag})


@pytest.fixture
async def paged(bench: Bench) -> PagedSource:
    """Four groups, read by a source that fails before the third of them."""
    await bench.query(
        "INSERT INTO connectors (tenant, source, kind, epoch) VALUES (%s, %s, 'world', 1)", bench.tenant, bench.name
    )
    bench.world.groups = {"g1": ({"ann"}, {"g4"}), "g2": ({"bob"}, set()), "g3": ({"cy"}, set()), "g4": (set(), set())}
    source = PagedSource(bench.world, context(bench))
    source.error, source.error_before = Retryable("the source cannot respond"), "g3"
    return source


async def until_interrupted(bench: Bench, source: PagedSource) -> dict[str, list[str]]:
    """List the groups up to the error. Returns what was published until then."""
    assert source.error is not None
    with pytest.raises(type(source.error)):
        await reading(bench, Holder(bench.tenant, bench.name, 1), source).read_all(frozenset())
    source.error = None
    return await newest(bench, {})


async def test_people_of_the_first_half_of_the_groups_may_read_before_the_others_are_listed(
    bench: Bench, paged: PagedSource
) -> None:
    assert await until_interrupted(bench, paged) == {"ann": ["g1"], "bob": ["g2"]}


async def test_a_runner_that_was_killed_after_half_of_the_groups_lists_the_others_only(
    bench: Bench, paged: PagedSource
) -> None:
    await until_interrupted(bench, paged)
    bench.world.groups["g4"] = ({"dee"}, {"g2"})
    bench.world.history.clear()
    await reading(bench, Holder(bench.tenant, bench.name, 1), paged).read_all(frozenset())
    assert bench.world.history == ["g3", "g4"]
    assert await newest(bench, {}) == {"cy": ["g3"], "dee": ["g1", "g4"], "bob": ["g1", "g2", "g4"]}
    bench.world.history.clear()
    await reading(bench, Holder(bench.tenant, bench.name, 1), paged).read_all(frozenset())
    assert bench.world.history == ["g1", "g2", "g3", "g4"]
    assert await newest(bench, {}) == {}


async def test_an_interrupted_listing_takes_no_group_that_it_has_not_read_from_anybody(
    bench: Bench, paged: PagedSource
) -> None:
    holder = Holder(bench.tenant, bench.name, 1)
    error, paged.error = paged.error, None
    await reading(bench, holder, paged).read_all(frozenset())
    await newest(bench, {})
    del bench.world.groups["g1"], bench.world.groups["g3"]
    paged.error, paged.error_before = error, "g4"
    assert await until_interrupted(bench, paged) == {}
    assert await reading(bench, holder, paged).read_all(frozenset()) == {"identities": 2, "warnings": []}
    assert await newest(bench, {}) == {"ann": [], "cy": []}


async def test_a_listing_that_was_interrupted_for_long_starts_again(bench: Bench, paged: PagedSource) -> None:
    await until_interrupted(bench, paged)
    await bench.query(
        "UPDATE connectors SET groups_listing = groups_listing || jsonb_build_object('kept_at', now() - %s)"
        " WHERE tenant = %s",
        MAX_INTERRUPTION,
        bench.tenant,
    )
    bench.world.history.clear()
    await reading(bench, Holder(bench.tenant, bench.name, 1), paged).read_all(frozenset())
    assert bench.world.history == ["g1", "g2", "g3", "g4"]


async def test_a_listing_whose_cursor_has_expired_starts_again(bench: Bench, paged: PagedSource) -> None:
    paged.error = CursorExpired("the cursor is no longer known")
    with pytest.raises(Retryable):
        await reading(bench, Holder(bench.tenant, bench.name, 1), paged).read_all(frozenset())
    paged.error = None
    bench.world.history.clear()
    await reading(bench, Holder(bench.tenant, bench.name, 1), paged).read_all(frozenset())
    assert bench.world.history == ["g1", "g2", "g3", "g4"]


async def test_a_member_who_left_while_all_groups_are_listed_does_not_return_with_the_rest_of_the_listing(
    bench: Bench, paged: PagedSource
) -> None:
    """The group was read alone, by an event, after the listing had begun."""
    holder = Holder(bench.tenant, bench.name, 1)
    await until_interrupted(bench, paged)
    bench.world.groups["g3"] = (set(), set())
    some = reading(bench, holder, paged)
    some._clock = Clock(await Rows(bench.pool, holder).last_stamp())
    await some.read_some(frozenset({"g3"}))
    bench.world.groups["g3"] = ({"cy"}, set())  # as an older response would show it
    await reading(bench, holder, paged).read_all(frozenset())
    assert "cy" not in await newest(bench, {})


def context(bench: Bench) -> Context:
    return Context(name=bench.name, tenant=bench.tenant, memory=None, folder=bench.folder)  # type: ignore[arg-type]


def reading(bench: Bench, holder: Holder, source: WorldSource | None = None) -> Identities:
    """Every page of a listing is a part of its own."""
    return Identities(
        source or WorldSource(bench.world, context(bench)),
        bench.producer,
        bench.pool,
        holder,
        Clock(None),
        between_pages=lambda: None,
        part_seconds=0,
    )


def instance(holder: Holder) -> tuple[str, str]:
    return holder.tenant, holder.source


async def rows_read(pool: Pool) -> int:
    """Rows that have been read of the two tables, as the server counts them."""
    async with pool.connection() as connection:
        await connection.execute("SELECT pg_stat_force_next_flush()")
        await connection.commit()
        cursor = await connection.execute(
            "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_user_tables"
            " WHERE relname IN ('connector_groups', 'connector_principals')"
        )
        [(count,)] = await cursor.fetchall()
        return int(count)


async def test_writing_a_listing_of_groups_blocks_neither_heartbeats_nor_documents(bench: Bench) -> None:
    holder = Holder(bench.tenant, f"slow-{uuid.uuid4().hex[:8]}", 1)
    await bench.query(
        "INSERT INTO connectors (tenant, source, kind, epoch) VALUES (%s, %s, 'world', 1)", *instance(holder)
    )
    at = datetime.now(UTC)
    tables = MembershipTables(bench.pool, holder)
    before, after = {"hr": GroupMembers("hr", ("ann",), (), at)}, {"hr": GroupMembers("hr", ("bob",), (), at)}
    await tables.replace_groups({}, before)
    for write in (
        partial(tables.replace_groups, before, after),
        partial(tables.merge_groups, list(before.values()), at, ["hr"]),
    ):
        async with bench.pool.connection() as slow, slow.transaction(force_rollback=True):
            await slow.execute("SELECT FROM connector_groups WHERE source = %s FOR UPDATE", [holder.source])
            writing = asyncio.create_task(write())
            async with asyncio.timeout(60):
                while not await bench.query(
                    "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ 'connector_groups'"
                    " AND pg_backend_pid() <> pid AND pid = ANY(SELECT pid FROM pg_locks WHERE NOT granted)"
                ):
                    await asyncio.sleep(0.02)
            async with bench.pool.connection() as beating:
                await beating.execute("SET LOCAL lock_timeout = '10s'")
                await beating.execute("UPDATE connectors SET seen_at = now() WHERE source = %s", [holder.source])
            async with asyncio.timeout(60):
                await Rows(bench.pool, holder).intend([], at)
        await writing
