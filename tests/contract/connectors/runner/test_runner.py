"""The runner on real Kafka and Postgres, reading a world that the test changes."""

from __future__ import annotations

import asyncio
import errno
import stat
from collections import Counter
from pathlib import Path

import pytest

from connectors.runner.instance import Instance
from connectors.runner.rows import Rows
from connectors.runner.state import PostgresMemory
from connectors.source import Context, Reaction, Request, Unreadable
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from tests.support.connectors.runner_kit import Bench, kinds, running
from tests.support.connectors.runner_world import WorldSource

pytestmark = pytest.mark.stack


async def test_the_first_load_uses_the_backfill_lane_and_changes_meanwhile_the_live_lane(bench: Bench) -> None:
    bench.world.fill(9)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def before(method: str, number: int) -> None:
        if (method, number) == ("full", 2):
            reached.set()
            await go_on.wait()

    bench.world.before = before
    async with bench.running(poll_seconds=0.1) as instance:
        await reached.wait()
        bench.world.write("d000", "edited while the load stands still")
        bench.world.write("new", "written while the load stands still")
        await bench.until(lambda: instance.published["upserted"] == 8)
        during = await bench.records()
        go_on.set()
        await bench.until(lambda: bench.done(instance, "full", "sweep"))
    assert sorted(m.external_id for t, m in during if t == "documents.live.v1") == ["d000", "new"]
    assert len([m for t, m in during if t == "documents.backfill.v1"]) == 6
    after = await bench.records()
    assert sorted(m.external_id for _, m in after) == ["d006", "d007", "d008"]
    assert {topic for topic, _ in after} == {"documents.backfill.v1"}
    assert bench.world.closed == 1


async def test_a_page_that_ends_at_an_id_that_postgres_refuses_is_passed(bench: Bench) -> None:
    """Its cursor could not be stored, so that the first load stopped there for ever."""
    for id_ in ("a", "b\x00", "c\x00", "d"):
        bench.world.write(id_, "Some text.")
    async with bench.loaded():
        assert await bench.mine("external_id", "connector_items", "true") == [("a",), ("d",)]
        bench.world.write("e", "Some text.")
        await bench.ask("changes")
        assert kinds(await bench.take()) == [("document.upserted", "e")]


async def test_reading_an_unchanged_source_publishes_nothing(bench: Bench) -> None:
    bench.world.fill(7)
    bench.world.groups["staff"] = ({"ann@acme.example"}, set())
    async with bench.loaded():
        for action in ("changes", "sweep", "groups", "full"):
            outcome = await bench.ask(action)
            assert "error" not in outcome
        assert await bench.take() == []
        assert bench.world.fetched == {}


async def test_what_a_source_keeps_on_disk_is_readable_by_its_owner_alone(bench: Bench) -> None:
    """Clones of repositories, rows of databases and downloads were everybody's on the machine to read."""
    folder = bench.folder / bench.name
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    async with bench.loaded():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_folder_on_a_volume_without_modes_keeps_no_source_from_being_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, mode: int) -> None:
        refused.append(folder)
        raise OSError(errno.ENOTSUP, "Operation not supported")

    refused = list[Path]()
    monkeypatch.setattr(Path, "chmod", refuse)
    async with bench.loaded():
        assert refused == [bench.folder / bench.name]


async def test_each_kind_of_change_is_published_as_its_kind_of_message(bench: Bench) -> None:
    bench.world.fill(5)
    async with bench.loaded():
        bench.world.write("d000", "edited")
        bench.world.write("d001", acl_tags=["board"])
        bench.world.remove("d002")
        bench.world.documents["d003"] = Unreadable(
            external_id="d003", code="encrypted", message="it has a password", acl_tags=["board"]
        )
        bench.world.history.append("d003")
        await bench.ask("changes")
        messages = await bench.take()
        assert kinds(messages) == [
            ("document.access-changed", "d001"),
            ("document.access-changed", "d003"),
            ("document.deleted", "d002"),
            ("document.upserted", "d000"),
        ]
        assert await bench.mine("external_id, problem_code", "connector_items", "problem_code <> ''") == [
            ("d003", "encrypted")
        ]


async def test_a_sweep_publishes_changes_that_no_event_reported(bench: Bench) -> None:
    bench.world.fill(6)
    async with bench.loaded():
        bench.world.silently("d000", content="edited", revision="2")
        bench.world.silently("d001", acl_tags=["board"])
        del bench.world.documents["d002"]
        bench.world.silently("d003", required_tags=["space:secret"])
        await bench.ask("sweep")
        assert kinds(await bench.take()) == [
            ("document.access-changed", "d001"),
            ("document.access-changed", "d003"),
            ("document.deleted", "d002"),
            ("document.upserted", "d000"),
        ]
        assert set(bench.world.fetched) == {"d000", "d002"}
        await bench.ask("sweep")
        assert await bench.take() == []


async def test_a_restored_document_is_published_with_a_newer_version(bench: Bench) -> None:
    bench.world.fill(2)
    async with bench.loaded():
        kept = bench.world.documents["d000"]
        bench.world.remove("d000")
        await bench.ask("changes")
        [deleted] = await bench.take()
        bench.world.documents["d000"] = kept
        await bench.ask("sweep")
        [restored] = await bench.take()
        assert restored.version > deleted.version
        assert restored.observed_at > deleted.observed_at


async def test_a_truncated_listing_deletes_nothing_even_when_it_is_confirmed(bench: Bench) -> None:
    bench.world.fill(40)
    async with bench.loaded():
        bench.world.truncated = 3
        outcome = await bench.ask("sweep")
        assert "lacks 37 of 40" in outcome["problems"][0]
        assert await bench.mine("guard->>'missing'", "connectors") == [("37",)]
        outcome = await bench.ask("allow_mass_delete")
        assert "37 documents that are still there" in outcome["problems"][0]
        assert await bench.take() == []
        bench.world.truncated = None
        outcome = await bench.ask("sweep")
        assert outcome["problems"] == []
        assert await bench.take() == []


async def test_a_mass_deletion_waits_for_an_operators_approval_and_then_proceeds(bench: Bench) -> None:
    bench.world.fill(40)
    async with bench.loaded():
        for n in range(10, 40):
            del bench.world.documents[f"d{n:03}"]
        await bench.ask("sweep")
        assert await bench.take() == []
        outcome = await bench.ask("allow_mass_delete")
        assert outcome["deleted"] == 30
        assert len(kinds(await bench.take())) == 30
        assert await bench.mine("guard", "connectors") == [(None,)]


async def test_a_document_written_during_a_listing_is_not_deleted(bench: Bench) -> None:
    bench.world.fill(6)
    async with bench.loaded() as instance:

        async def before(method: str, number: int) -> None:
            if (method, number) == ("slim", 1):
                bench.world.before = None
                bench.world.write("a-first-page", "the listing has passed this place")
                await instance.react(Reaction(ids=["a-first-page"]))
                await bench.until(lambda: bench.world.fetched["a-first-page"] == 1)
                await asyncio.sleep(0.3)

        bench.world.before = before
        await bench.ask("sweep")
        assert kinds(await bench.take()) == [("document.upserted", "a-first-page")]
        assert bench.world.fetched["a-first-page"] == 1


async def test_a_runner_killed_mid_crawl_resumes_without_publishing_twice(bench: Bench) -> None:
    bench.world.fill(12)
    for page in (1, 3):
        reached = asyncio.Event()

        async def before(method: str, number: int, page: int = page, reached: asyncio.Event = reached) -> None:
            if (method, number) == ("full", page):
                reached.set()
                await asyncio.Event().wait()

        bench.world.before = before
        async with bench.running():
            await reached.wait()
    bench.world.before = None
    async with bench.running() as instance:
        await bench.until(lambda: bench.done(instance, "full", "sweep"))
    assert kinds(await bench.take()) == [("document.upserted", f"d{n:03}") for n in range(12)]


async def test_a_runner_killed_between_kafka_and_its_rows_publishes_one_page_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.world.fill(9)
    saved, save = [], Rows.save

    async def dies(self: Rows, *arguments: object, **cursors: object) -> None:
        if cursors.get("full") is not None:
            saved.append(1)
            if len(saved) == 2:
                await asyncio.Event().wait()
        await save(self, *arguments, **cursors)  # type: ignore[arg-type]

    monkeypatch.setattr(Rows, "save", dies)
    async with bench.running():
        await bench.until(lambda: len(saved) == 2)
    monkeypatch.setattr(Rows, "save", save)
    async with bench.running() as instance:
        await bench.until(lambda: bench.done(instance, "full", "sweep"))
    messages = [id_ for _, id_ in kinds(await bench.take())]
    assert sorted(set(messages)) == [f"d{n:03}" for n in range(9)]
    assert sorted(id_ for id_ in set(messages) if messages.count(id_) > 1) == ["d003", "d004", "d005"]


async def test_a_cursor_that_expires_mid_crawl_starts_over_without_publishing_twice(bench: Bench) -> None:
    bench.world.fill(10)
    bench.world.full_expires_at = {2}
    async with bench.running() as instance:
        await bench.until(lambda: bench.done(instance, "full", "sweep"))
    assert kinds(await bench.take()) == [("document.upserted", f"d{n:03}") for n in range(10)]


async def test_an_expired_cursor_of_changes_causes_a_sweep_and_a_new_cursor(bench: Bench) -> None:
    bench.world.fill(4)
    async with bench.loaded() as instance:
        bench.world.write("d000", "edited, and the feed forgot it")
        bench.world.remove("d001")
        bench.world.expired_before = len(bench.world.history)
        sweeps = instance.activities["sweep"].status.succeeded_at
        await bench.ask("changes")
        await bench.until(lambda: instance.activities["sweep"].status.succeeded_at != sweeps)
        assert kinds(await bench.take()) == [("document.deleted", "d001"), ("document.upserted", "d000")]
        bench.world.write("d002", "later")
        await bench.ask("changes")
        assert kinds(await bench.take()) == [("document.upserted", "d002")]


@pytest.mark.parametrize("error", [Deferred("429", retry_after=0.1), Retryable("500"), KeyError("a bug")])
async def test_errors_of_a_source_are_retried(bench: Bench, error: Exception) -> None:
    bench.world.fill(7)
    for method in ("start", "full", "slim", "groups"):
        bench.world.errors[method] = [error]
    async with bench.running(poll_seconds=0.2) as instance:
        await bench.until(lambda: bench.done(instance, "full", "sweep", "groups"), 60)
    assert len(kinds(await bench.take())) == 7


async def test_a_misconfigured_error_needs_attention_until_it_is_fixed(bench: Bench) -> None:
    bench.world.fill(1)
    bench.world.errors["changes"] = []
    async with bench.loaded(poll_seconds=0.3) as instance:
        bench.world.errors["changes"] = [Misconfigured("the token lacks the scope read:page")] * 3
        bench.world.write("d000", "edited")
        await bench.until(lambda: instance.activities["changes"].status.state == "needs attention")
        assert "read:page" in instance.problems()[0].message
        await bench.until(lambda: "needs_attention" not in [problem.code for problem in instance.problems()])
        await bench.until(lambda: instance.activities["changes"].status.state == "idle")
        assert kinds(await bench.take()) == [("document.upserted", "d000")]


async def test_a_connector_that_cannot_be_created_is_reported_to_prometheus(bench: Bench) -> None:
    errors = [Misconfigured("acl: there is no such key")]

    def make(context: Context) -> WorldSource:
        if errors:
            raise errors.pop()
        return WorldSource(bench.world, context)

    bench.make = make
    instance = bench.instance(poll_seconds=1.0)

    def stuck() -> float | None:
        registry = instance._services.metrics.registry
        return registry.get_sample_value("penstock_connector_not_working", {"source": "wiki", "activity": "start"})

    async with running(instance):
        await bench.until(lambda: stuck() == 1)
        await bench.until(lambda: stuck() == 0)


async def test_duplicated_and_reordered_events_publish_each_change_once(bench: Bench) -> None:
    bench.world.fill(3)
    async with bench.loaded() as instance:
        bench.world.write("d001", "edited")
        for ids in (["d001", "d001"], ["d000"], ["d001"], ["gone-for-good"]):
            await instance.react(Reaction(ids=ids))
        await bench.until(lambda: bench.done(instance, "events"))
        assert kinds(await bench.take()) == [("document.upserted", "d001")]
        await bench.ask("changes")
        assert await bench.take() == []


async def test_a_thousand_repeated_events_cause_one_more_fetch_and_sweep(bench: Bench) -> None:
    bench.world.fill(3)
    async with bench.loaded() as instance:
        looks: Counter[str] = Counter()
        replayed = asyncio.Event()

        async def before(method: str, number: int) -> None:
            looks[method] += number == 0
            await replayed.wait()

        bench.world.before = before
        await instance.react(Reaction(ids=["d001"], sweep=True))
        await bench.until(lambda: {"fetch", "slim"} <= set(looks))
        for _ in range(1_000):
            await instance.react(Reaction(ids=["d001"], sweep=True))
        replayed.set()
        await bench.until(lambda: looks["fetch"] == looks["slim"] == 2)
        await bench.ask("sweep")
        await bench.until(lambda: instance.activities["events"].status.state == "idle")
        assert looks == {"fetch": 2, "slim": 3}, "the last one was asked for"


@pytest.mark.parametrize("reaction", [Reaction(ids=["d001"]), Reaction(sweep=True)], ids=["document", "sweep"])
async def test_a_deletion_that_only_an_event_shows_survives_a_runner_killed_before_reading_it(
    bench: Bench, reaction: Reaction
) -> None:
    """GitHub sends no event again, and its next poll shows no deletions: they waited for the next sweep."""
    bench.world.fill(3)
    async with bench.loaded() as instance:
        reached = asyncio.Event()

        async def before(method: str, number: int) -> None:
            if method in ("fetch", "slim"):
                reached.set()
                await asyncio.Event().wait()

        bench.world.before = before
        del bench.world.documents["d001"]
        await instance.react(reaction)
        assert await stored_events(bench), "it is stored on return"
        await reached.wait()
        await asyncio.sleep(0.3)  # some heartbeats, which keep it
    bench.world.before = None
    async with bench.running():
        await bench.until(lambda: stored_nothing(bench))
    assert kinds(await bench.take()) == [("document.deleted", "d001")]


async def stored_events(bench: Bench) -> object:
    """Return what the next runner will read: the arguments of each activity, or None."""
    rows = await bench.mine("value", "connector_memory", "name = 'runner:unfinished'")
    assert len(rows) < 2
    return rows[0][0] if rows else None


async def stored_nothing(bench: Bench) -> bool:
    return await stored_events(bench) is None


async def test_an_event_that_cannot_be_stored_is_not_acknowledged(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.world.fill(1)
    async with bench.loaded() as instance:

        async def refuse(self: PostgresMemory, name: str, value: object) -> None:
            raise Retryable("Postgres is away")

        monkeypatch.setattr(PostgresMemory, "put", refuse)
        bench.world.before = never
        with pytest.raises(Retryable):
            await instance.on_event(Request({}, {}, b'["d000"]'))
        monkeypatch.undo()
        await instance.on_event(Request({}, {}, b'["d000"]'))
        assert await stored_events(bench) == {"events": ["d000"]}


async def test_a_runner_that_cannot_read_what_the_last_one_stored_leaves_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last heartbeat removed what it had never read."""
    bench.world.fill(1)
    async with bench.loaded() as instance:
        bench.world.before = never
        await instance.react(Reaction(ids=["d000"]))
    refused = asyncio.Event()

    async def refuse(self: PostgresMemory, name: str) -> None:
        refused.set()
        raise Retryable("Postgres is away")

    monkeypatch.setattr(PostgresMemory, "get", refuse)
    async with bench.running():
        await refused.wait()
        await asyncio.sleep(0.3)  # some heartbeats
    assert await stored_events(bench) == {"events": ["d000"]}


async def test_a_runner_that_has_lost_its_lease_leaves_what_the_next_one_stored(bench: Bench) -> None:
    """Its last heartbeat removed an event that the next one had acknowledged, and that one did not write it again."""
    bench.world.fill(2)
    async with bench.loaded() as instance:
        bench.world.before = never
        await instance.react(Reaction(ids=["d000"]))
        await bench.query(
            "WITH taken AS (UPDATE connectors SET epoch = epoch + 1 WHERE tenant = %s)"
            ' UPDATE connector_memory SET value = \'{"events": ["d001"]}\''
            " WHERE tenant = %s AND name = 'runner:unfinished'",
            bench.tenant,
            bench.tenant,
        )
        instance.activities["events"].trigger("d777")
        await bench.until(lambda: lost(instance))
        assert await stored_events(bench) == {"events": ["d001"]}


async def lost(instance: Instance) -> bool:
    return instance.source is None


async def never(method: str, number: int) -> None:
    await asyncio.Event().wait()


async def test_events_of_many_documents_store_a_sweep_in_their_place(bench: Bench) -> None:
    """A flood of events would otherwise have each of them write the names of all others."""
    bench.world.fill(1)
    async with bench.loaded() as instance:
        bench.world.before = never
        await instance.react(Reaction(ids=[f"x{n}" for n in range(1_001)]))
        assert await stored_events(bench) == {"sweep": ["event"]}


async def test_a_late_read_of_changes_does_not_undo_a_newer_fetch(bench: Bench) -> None:
    """The crawl read a page, was slow, and meanwhile an event had the document read again."""
    bench.world.fill(3)
    async with bench.loaded() as instance:
        bench.world.write("d001", "old")
        old = bench.world.documents["d001"]

        async def before(method: str, number: int) -> None:
            if method == "changes":
                bench.world.before = None
                bench.world.write("d001", "new")
                await bench.until(lambda: instance.activities["events"].status.state == "idle")
                await instance.react(Reaction(ids=["d001"]))
                await bench.until(lambda: bench.done(instance, "events"))
                bench.world.documents["d001"], newest = old, bench.world.documents["d001"]
                bench.world.history.append("d001")
                await asyncio.sleep(0)
                self_heals.append(newest)

        self_heals: list[object] = []
        bench.world.before = before
        await bench.ask("changes")
        messages = [m for m in await bench.take() if m.external_id == "d001"]
        assert [m.content for m in messages] == ["new"]


async def test_a_too_large_or_invalid_document_is_a_problem_of_that_document_alone(bench: Bench) -> None:
    bench.world.write("a", "fine")
    bench.world.write("b", "x" * (4 * 1024 * 1024 + 1))
    bench.world.write("c", metadata={"deep": {"er": 1}})
    bench.world.write("d" * 2500, "an id that no table takes")
    bench.world.write("e", acl_tags=["t" * 501, "staff"])
    bench.world.write("f", acl_tags=["staff"], required_tags=["t" * 501])
    async with bench.running() as instance:
        await bench.until(lambda: bench.done(instance, "full"))
    messages = {m.external_id: m for m in await bench.take()}
    assert set(messages) == {"a", "e", "f"}
    assert messages["e"].acl_tags == ["staff"]
    assert messages["f"].acl_tags == [], "a restriction that cannot be expressed shuts everybody out"
    problems = dict(await bench.mine("external_id, problem_message", "connector_items", "problem_code <> ''"))
    assert set(problems) == {"b", "c"}
    assert "4194304" in problems["b"]


async def test_a_document_that_becomes_invalid_keeps_its_text_under_its_new_access(bench: Bench) -> None:
    bench.world.write("a", "fine")
    async with bench.loaded():
        bench.world.write("a", "x" * (4 * 1024 * 1024 + 1), acl_tags=["board"])
        await bench.ask("changes")
        [message] = await bench.take()
        assert (message.kind, message.acl_tags) == ("document.access-changed.v1", ["board"])
        bench.world.write("a", "fine", acl_tags=["board"])
        await bench.ask("changes")
        assert await bench.take() == []
        assert await bench.mine("1", "connector_items", "problem_code <> ''") == []


async def test_observation_times_precede_the_read_of_the_source(bench: Bench) -> None:
    bench.world.fill(7)
    async with bench.running() as instance:
        await bench.until(lambda: bench.done(instance, "full"))
    times = sorted(at for method, at in bench.world.reads if method == "full")
    for message in await bench.take():
        page = int(message.external_id[1:]) // 3
        assert message.observed_at < times[page]
        assert page == 0 or message.observed_at > times[page - 1]


async def test_changed_memberships_are_published_as_full_sets(bench: Bench) -> None:
    bench.world.groups = {
        "staff": ({"ann", "bob"}, {"inner", "user:eve"}),
        "inner": ({"cy"}, {"ring"}),
        "ring": (set(), {"inner"}),
        "user:ann": ({"eve", "mallory"}, {"inner"}),  # a tag that is Ann's alone is no group's
    }
    async with bench.running() as instance:
        await bench.until(lambda: bench.done(instance, "groups"))
        messages = {m.principal: m.groups for m in await bench.take()}
        assert messages == {
            "ann": ["staff"],
            "bob": ["staff"],
            "cy": ["inner", "ring", "staff"],
            "eve": ["staff"],
        }
        bench.world.groups["staff"][0].discard("bob")
        await instance.react(Reaction(groups=["staff"]))
        await bench.until(lambda: bench.done(instance, "tags"))
        assert {m.principal: m.groups for m in await bench.take()} == {"bob": []}
        bench.world.groups.pop("inner")
        bench.world.errors["group"] = [Retryable("500")]
        await bench.ask("groups")
        assert {m.principal: m.groups for m in await bench.take()} == {"cy": []}
        await bench.ask("groups")
        assert await bench.take() == []


async def test_a_listing_of_groups_that_fails_changes_no_membership(bench: Bench) -> None:
    bench.world.groups = {"a": ({"ann"}, set()), "b": ({"bob"}, set())}
    async with bench.loaded():
        bench.world.groups = {"a": (set(), set())}
        bench.world.errors["group"] = [Misconfigured("the token lacks the scope read:group")]
        outcome = await bench.ask("groups")
        assert "read:group" in outcome["error"]
        assert await bench.take() == []


async def test_a_paused_runner_publishes_nothing_and_resumes_where_it_stopped(bench: Bench) -> None:
    bench.world.fill(9)
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def before(method: str, number: int) -> None:
        if (method, number) == ("full", 1) and not go_on.is_set():
            reached.set()
            await go_on.wait()

    bench.world.before = before
    async with bench.running() as instance:
        await reached.wait()
        await bench.pause(True)
        await bench.until(lambda: not instance._not_paused.is_set())
        go_on.set()
        await bench.until(lambda: instance.activities["full"].status.state == "paused")
        assert len(await bench.take()) == 6
        await bench.pause(False)
        await bench.until(lambda: bench.done(instance, "full"))
        assert [id_ for _, id_ in kinds(await bench.take())] == ["d006", "d007", "d008"]


async def test_a_second_runner_of_an_instance_waits(bench: Bench) -> None:
    bench.world.fill(3)
    async with bench.loaded(), bench.running() as second:
        await bench.until(lambda: second.start.reason is not None)
        assert "another process" in (second.start.reason or "")
        assert second.source is None
        bench.world.write("d000", "edited")
        await bench.ask("changes")
    assert kinds(await bench.take()) == [("document.upserted", "d000")]


async def test_a_runner_that_lost_its_lease_takes_a_new_one_with_the_next_epoch(bench: Bench) -> None:
    bench.world.fill(3)
    async with bench.loaded() as instance:
        await bench.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'penstock connector' AND datname = current_database()"
        )
        await bench.until(lambda: instance.start.state == "waiting")
        await bench.until(lambda: instance.start.state == "running")
        bench.world.write("d000", "edited")
        await bench.ask("changes")
        assert kinds(await bench.take()) == [("document.upserted", "d000")]
    assert await bench.mine("epoch", "connectors") == [(2,)]


async def test_a_single_document_is_read_again_on_request(bench: Bench) -> None:
    bench.world.fill(3)
    async with bench.loaded():
        bench.world.silently("d001", content="edited")
        assert (await bench.ask("document", "d001"))["upserted"] == 1
        assert (await bench.ask("document", "d001"))["unchanged"] == 1
        assert kinds(await bench.take()) == [("document.upserted", "d001")]


async def test_a_source_without_a_log_of_changes_is_swept_at_every_poll(bench: Bench) -> None:
    bench.world.has_log = False
    bench.world.fill(3)
    async with bench.loaded() as instance:
        bench.world.write("d000", "edited")
        bench.world.remove("d001")
        outcome = await bench.ask("changes")
        assert kinds(await bench.take()) == [("document.deleted", "d001"), ("document.upserted", "d000")]
        assert (outcome["upserted"], outcome["deleted"], outcome["listed"]) == (1, 1, 2)
        bench.world.silently("d002", content="edited", revision=None)
        outcome = await bench.ask("changes")
        assert "no_revision" in [problem.code for problem in instance.problems()]
        assert "edits of them are not noticed" in outcome["problems"][0]


async def test_tags_that_nobody_holds_are_named(bench: Bench) -> None:
    """A reader who is missing in every group was silent: documents were indexed, and nobody saw them."""
    bench.world.fill(2)
    bench.world.write("mine", acl_tags=["user:ann@acme.example"])
    bench.world.groups["board"] = ({"bob@acme.example"}, set())
    async with bench.loaded() as instance:
        expected = (
            "nobody holds the tag 'staff' (2 documents): the source's groups name no member of it, so it admits nobody"
        )
        assert (await bench.ask("groups"))["warnings"] == [expected]
        await bench.until(lambda: [p.message for p in instance.problems()] == [expected])
        bench.world.groups["staff"] = (set(), {"board"})
        assert (await bench.ask("groups"))["warnings"] == []
        assert instance.problems() == []
