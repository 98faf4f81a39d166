"""One document's data never stops its source: what the runner does about any source whose code raises for one item."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from ssl import SSLCertVerificationError
from typing import Any, cast

import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs

import connectors.set_aside as aside
from connectors.conform.memory_runner import MemoryRunner, readable
from connectors.errors import BadData, BadEntry
from connectors.runner.guard import FAILING_DOCUMENTS
from connectors.runner.isolate import BY_ID
from connectors.runner.membership import GroupMembers, PublishedSet
from connectors.set_aside import UNEXPECTED, SetAside, each, reading_data
from connectors.source import Cursor, Entry, Gone, Group, Listed, Page, Unlisted
from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Retryable
from tests.support.connectors.runner_world import World, WorldSource
from tests.unit.connectors.runner.test_reading import LONG_AGO, Reading


class Model(BaseModel):
    number: int


def deep(level: int = 0) -> int:
    return deep(level + 1)


POISONS: dict[str, Callable[[], object]] = {
    "a number of 5,000 digits": lambda: int("9" * 5_000),
    "infinity as a whole number": lambda: int(float("inf")),
    "half of a character": lambda: "\ud800".encode(),
    "bytes of another encoding": lambda: b"\xff".decode(),
    "an odd date": lambda: __import__("datetime").datetime.fromisoformat("9999-99-99"),
    "deep nesting": deep,
    "a field of another type": lambda: "text" + cast(Any, 3),
    "a missing field": lambda: {}["title"],
    "no object": lambda: cast(Any, None).get("id"),
    "an invalid model": lambda: Model.model_validate({"number": "many"}),
    "a list that is too short": lambda: [][0],
    "a division by zero": lambda: 1 / 0,
    "an entry's field of another type": lambda: Listed(external_id=cast(Any, 17), acl_tags=()),
}


class Poisoned(WorldSource):
    """A source whose code fails at one document, wherever it meets it."""

    def __init__(self, world: World, poison: Callable[[], object] = POISONS["a missing field"]) -> None:
        super().__init__(world, cast(Any, None))
        self.poison = poison
        self.ids: set[str] = {"d004"}
        self.groups_of_poison: set[str] = set()
        self.slims = 0

    def _entry(self, id_: str) -> Entry:
        if id_ in self.ids:
            self.poison()
        return super()._entry(id_)

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        async for page in super().full(cursor):
            yield Page([self._entry(entry.external_id) for entry in page.entries], page.cursor)

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        self.slims += 1
        async for page in super().slim():
            yield page

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        async for group in super().groups(tags):
            if group.tag in self.groups_of_poison:
                self.poison()
            yield group


@pytest.fixture(autouse=True)
def files_are_not_extracted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def condition() -> dict[str, str]:
        return {"files": "unreachable"}

    monkeypatch.setattr("connectors.runner.sweep.condition", condition)
    monkeypatch.setattr(aside, "_logged", {})


def runner_of(documents: int = 9, poison: Callable[[], object] = POISONS["a missing field"]) -> Any:
    world = World()
    world.fill(documents)
    world.groups = {"staff": ({"ann"}, {"board"}), "board": ({"bob"}, set())}
    return MemoryRunner(Poisoned(world, poison), SetAside())


@pytest.mark.parametrize("poison", POISONS)
async def test_a_document_whose_data_cannot_be_read_stops_no_activity(poison: str) -> None:
    """The whole source stopped for ever, because the same document came again after each restart."""
    runner = runner_of(poison=POISONS[poison])
    good = {f"d{n:03}" for n in range(9)} - {"d004"}
    assert await runner.full()
    assert runner.published.keys() == good
    assert runner.progress.full_state == "done"
    assert runner.rows["d004"].problem_code == UNEXPECTED
    await runner.changes()
    before = runner.progress.changes_cursor
    for id_ in ("d003", "d004", "d005"):
        runner.source.world.write(id_, "edited")
    assert await runner.changes()
    assert runner.progress.changes_cursor["at"] == before["at"] + 3
    assert await runner.sweep()
    assert {id_ for id_, document in runner.published.items() if document.content == "edited"} == {"d003", "d005"}
    assert runner.deleted == []
    assert UNEXPECTED in runner.status
    assert "9999" not in runner.status, "it quotes the data"
    runner.source.ids.clear()
    assert await runner.changes()
    assert await runner.sweep()
    assert runner.published["d004"].content == "edited"
    assert runner.status == ""


async def test_a_document_whose_data_cannot_be_read_is_closed_until_a_listing_shows_its_readers() -> None:
    runner = runner_of()
    runner.source.ids.clear()
    assert await runner.full()
    groups = await runner.groups()
    assert "d004" in readable(runner, "ann", groups)
    runner.source.ids.add("d004")
    await runner._crawl().fetch(frozenset({"d003", "d004"}))
    assert "d004" not in readable(runner, "ann", groups), "who may read it is among the data that cannot be read"
    runner.source.world.silently("d003", acl_tags=["board"], revision="2")
    runner.source.world.silently("d004", acl_tags=["board"], revision="2")
    assert await runner.sweep()
    assert runner.published["d004"].acl_tags == ["board"], "the listing shows who may read it"
    assert runner.published["d004"].content == "text"
    assert "d004" not in readable(runner, "ann", groups)
    assert runner.deleted == []


async def test_the_access_of_a_listing_replaces_none_that_was_read_after_it() -> None:
    """The sweep's fetch was stamped after the event, and so whoever had lost the document could read it again."""
    runner = runner_of()
    runner.source.ids.clear()
    assert await runner.full()
    runner.source.ids.add("d004")
    runner.source.world.silently("d004", revision="2")

    async def closed_by_an_event(method: str, number: int) -> None:
        if (method, number) == ("slim", 1):  # the page of d004
            runner.source.world.before = None
            await runner._crawl().fetch(frozenset({"d004"}))

    runner.source.world.before = closed_by_an_event
    assert await runner.sweep()
    assert runner.published["d004"].acl_tags == [], "the event came after the listing"
    assert await runner.sweep()
    assert runner.published["d004"].acl_tags == ["staff"]


async def test_a_set_aside_document_that_is_removed_at_the_source_is_deleted() -> None:
    runner = runner_of()
    runner.source.ids.clear()
    await runner.full()
    runner.source.ids.add("d004")
    await runner._crawl().fetch(frozenset({"d004"}))
    runner.source.ids.clear()
    runner.source.world.remove("d004")
    assert await runner.sweep()
    assert runner.deleted == ["d004"]


async def test_a_full_read_by_ids_leaves_out_what_was_read_before() -> None:
    runner = runner_of(documents=9)
    assert await runner.full()
    assert runner.source.world.fetched.keys() == {f"d{n:03}" for n in range(3, 9)}


async def test_a_full_read_continues_by_ids_after_a_restart() -> None:
    runner = runner_of(documents=50)
    progress = []

    async def stopped(method: str, _number: int) -> None:
        progress.append(runner.progress.full_cursor)
        if method == "fetch" and runner.progress.full_cursor == {BY_ID: "d022"}:
            raise Misconfigured("the process ends")

    runner.source.world.before = stopped
    assert not await runner.full()
    runner.source.world.before = None
    listings = runner.source.slims
    await runner._crawl().full(frozenset())
    assert len(runner.published) == 49
    assert runner.source.slims == listings + 1


@pytest.mark.parametrize(
    "error",
    [
        Retryable("down"),
        Deferred("429"),
        Misconfigured("no"),
        MemoryError(),
        OSError("disk"),
        RuntimeError("a bug"),
        SSLCertVerificationError("a ValueError, too"),
        asyncio.IncompleteReadError(b"", 1),
    ],
)
async def test_what_is_no_error_of_data_passes_as_before(error: Exception) -> None:
    runner = runner_of()
    runner.source.ids.clear()
    for method in ("full", "fetch", "changes", "slim"):
        runner.source.world.errors[method] = [error] * 10
    with pytest.raises(type(error)):
        await anext(runner.isolated.full(None))
    with pytest.raises(type(error)):
        await runner.isolated.fetch(["d001", "d002"])
    with pytest.raises(type(error)):
        await anext(runner.isolated.changes({"at": 0}))
    with pytest.raises(type(error)):
        await anext(runner.isolated.slim())
    assert not runner.source.world.fetched
    assert runner.isolated.problems == []


async def test_an_error_of_the_runner_itself_is_not_taken_for_one_of_data() -> None:
    runner = runner_of()
    runner.source.ids.clear()

    async def save(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    runner.save = save
    with pytest.raises(KeyError):
        await runner._crawl().full(frozenset())


async def test_a_listing_that_fails_deletes_nothing_and_is_shown() -> None:
    runner = runner_of()
    runner.source.ids.clear()
    await runner.full()
    runner.source.world.errors["slim"] = [KeyError("title")] * 10
    with pytest.raises(BadData, match=r"KeyError at runner_world\.py"):
        await runner._run_sweep()
    assert runner.deleted == []


# Groups


async def test_a_group_whose_data_cannot_be_read_is_held_by_nobody_and_others_are_read() -> None:
    runner = runner_of()
    runner.source.ids.clear()
    await runner.full()
    runner.source.groups_of_poison = {"board"}
    groups = await runner.groups()
    assert [(group.tag, set(group.members)) for group in groups] == [("staff", {"ann"})]
    assert "the holders of board cannot be read" in runner.status
    runner.source.groups_of_poison = {"staff"}
    assert await runner.groups() == []
    assert "the holders of staff cannot be read" in runner.status


class Tables(Reading):
    """The tables of memberships, of which nothing is in doubt but what a listing changes."""

    groups: Mapping[str, GroupMembers] = {}
    sets: Mapping[str, PublishedSet] = {}
    requested: Collection[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.world.groups = {"staff": ({"ann"}, {"board"}), "board": ({"bob"}, set()), "odd": ({"eve"}, set())}
        self.source = self._source = Poisoned(self.world)

    async def all_groups(self) -> Mapping[str, GroupMembers]:
        return self.groups

    async def all_published(self) -> Mapping[str, PublishedSet]:
        return self.sets

    async def documents_by_tag(self) -> Mapping[str, int]:
        return {"staff": 3, "odd": 1}

    async def merge_groups(self, _listed: object, _at: object, requested: Collection[str], _cursor: object) -> None:
        self.requested = requested

    async def in_doubt(self, _after: str, _at: object) -> list[object]:
        return []

    @property
    def sent_sets(self) -> dict[str, list[str]]:
        return {sent.principal: sent.groups for _, sent in cast(Any, self.sent)}


async def test_memberships_of_a_group_whose_data_cannot_be_read_end_and_others_are_read() -> None:
    """One odd member stopped the listing, and so every revocation in all groups of the source."""
    tables = Tables()
    identities = tables.identities
    await identities.read_all(frozenset())
    assert tables.sent_sets == {"ann": ["staff"], "bob": ["board", "staff"], "eve": ["odd"]}
    tables.sets = {name: PublishedSet(b"other", LONG_AGO) for name in tables.sent_sets}
    tables.sent.clear()
    tables.source.groups_of_poison = {"odd"}
    tables.world.groups["staff"] = ({"cid"}, {"board"})
    await identities.read_all(frozenset())
    assert tables.sent_sets == {"cid": ["staff"], "bob": ["board", "staff"], "ann": [], "eve": []}
    [problem] = [problem for problem in identities.problems if problem.code == "group_unreadable"]
    assert "the holders of 'odd' cannot be read, so nobody holds it" in problem.message
    assert not identities.is_complete
    tables.source.groups_of_poison = set()
    await identities.read_all(frozenset())
    assert identities.is_complete


async def test_a_group_within_a_requested_one_is_held_by_nobody_while_its_data_cannot_be_read() -> None:
    tables = Tables()
    tables.source.groups_of_poison = {"board"}
    await tables.identities.read_some(frozenset({"staff"}))
    assert set(tables.requested) == {"staff"}, "its own data can be read"
    tables.source.groups_of_poison = {"staff"}
    await tables.identities.read_some(frozenset({"staff", "odd"}))
    assert set(tables.requested) == {"staff", "odd"}


async def test_a_group_whose_data_cannot_be_read_takes_no_member_from_its_outer_groups() -> None:
    """A source that lists inner groups with the outer ones failed for each outer one, so that nobody held any."""
    tables = Tables()

    async def groups(tags: Collection[str] | None) -> AsyncIterator[Group]:
        for tag in sorted(tags or {f"outer{n}" for n in range(9)}):
            if tag.startswith("outer"):
                yield Group(tag, {"ann"}, {"inner"})
        raise KeyError("the inner group")

    tables.source.groups = cast(Any, groups)
    tables.groups = {f"outer{n}": GroupMembers(f"outer{n}", ("ann",), ("inner",), LONG_AGO) for n in range(9)}
    tables.sets = {"ann": PublishedSet(b"other", LONG_AGO)}
    await tables.identities.read_all(frozenset())
    assert tables.sent_sets == {"ann": sorted(tables.groups)}


async def test_memberships_stay_while_the_data_of_nearly_all_groups_cannot_be_read() -> None:
    tables = Tables()
    tables.world.groups = {f"g{n}": ({"ann"}, set()) for n in range(9)}
    tables.source.groups_of_poison = set(tables.world.groups)
    tables.groups = {tag: GroupMembers(tag, ("ann",), (), LONG_AGO) for tag in tables.world.groups}
    tables.sets = {"ann": PublishedSet(b"other", LONG_AGO)}
    with pytest.raises(Misconfigured, match="so no membership is changed"):
        await tables.identities.read_all(frozenset())
    assert tables.sent == []


async def test_a_group_that_is_none_is_no_end_of_the_listing() -> None:
    """The listing counted as complete, and everybody lost the groups after it."""
    tables = Tables()

    async def groups(_tags: object) -> AsyncIterator[Group]:
        yield Group("board", {"bob"})
        yield cast(Any, None)

    tables.source.groups = cast(Any, groups)
    tables.groups = {"staff": GroupMembers("staff", ("ann",), (), LONG_AGO)}
    tables.sets = {"ann": PublishedSet(b"other", LONG_AGO)}
    with pytest.raises(AttributeError):
        await tables.identities.read_all(frozenset())
    assert tables.sent == []


async def test_a_member_that_is_no_text_is_no_member_and_stops_nothing() -> None:
    tables = Tables()
    tables.world.groups = {"staff": (cast(Any, {"ann", 17, None}), set())}
    identities = tables.identities
    await identities.read_all(frozenset())
    assert tables.sent_sets == {"ann": ["staff"]}
    [problem] = [problem for problem in identities.problems if problem.code == "identity_invalid"]
    assert problem.message.startswith("2 names")


# When nearly everything fails


async def test_a_source_of_which_nearly_every_document_is_set_aside_counts_as_failing() -> None:
    runner = runner_of(documents=60)
    runner.source.ids = {f"d{n:03}" for n in range(60)}
    assert await runner.full()
    assert "of the 50 documents that were read last are set aside" in runner.isolated.failing
    runner.source.ids = {"d004"}
    assert await runner.sweep()
    assert runner.isolated.failing is None


async def test_a_few_documents_that_are_tried_again_and_again_are_no_failing_source() -> None:
    runner = runner_of()
    runner.source.ids = {f"d{n:03}" for n in range(FAILING_DOCUMENTS - 1)}
    await runner.full()
    for _ in range(20):
        assert await runner.sweep()
    assert runner.isolated.failing is None


async def test_documents_that_each_sweep_tries_again_do_not_hide_that_others_are_read() -> None:
    """With fifty of a hundred thousand documents set aside, the alert was on after each sweep."""
    runner = runner_of(documents=120)
    runner.source.ids = {f"d{n:03}" for n in range(50)}
    await runner.full()
    assert runner.isolated.failing is None
    for _ in range(3):
        assert await runner.sweep()
        assert runner.isolated.failing is None
    for n in range(50, 110):
        runner.source.world.write(f"d{n:03}", "edited")
    runner.source.ids = {f"d{n:03}" for n in range(120)}
    assert await runner.sweep()
    assert runner.isolated.failing is not None, "each that was edited is set aside"


@pytest.mark.parametrize(("removed", "deleted"), [(1, ["d070"]), (40, [])])
async def test_documents_that_a_listing_sets_aside_are_no_mass_deletion(removed: int, deleted: list[str]) -> None:
    """The guard kept them as they were published, and nothing was deleted any more."""
    runner = runner_of(documents=120)
    runner.source.ids.clear()
    await runner.full()
    poisoned = runner.source.ids = {f"d{n:03}" for n in range(60)}
    for n in range(70, 70 + removed):
        runner.source.world.remove(f"d{n:03}")

    async def slim() -> AsyncIterator[Sequence[Listed | Unlisted]]:
        async for page in WorldSource.slim(runner.source):
            yield [entry for entry in page if entry.external_id not in poisoned]
        unpublished = [f"new {n}" for n in range(25)]
        yield [Unlisted(part=f"document {id_}", reason="odd", is_document=True) for id_ in [*poisoned, *unpublished]]

    runner.source.slim = slim
    assert await runner.sweep()
    assert runner.deleted == deleted
    assert ("a sweep lacks 40 of 120 documents" in runner.status) == (removed == 40)
    assert {id_ for id_, document in runner.published.items() if not document.acl_tags} == poisoned


async def test_a_listing_of_which_nearly_every_document_is_set_aside_deletes_and_closes_nothing() -> None:
    runner = runner_of()
    runner.source.ids.clear()
    await runner.full()
    fetched = runner.source.world.fetched.total()

    async def slim() -> AsyncIterator[Sequence[Listed | Unlisted]]:
        yield [Unlisted(part=f"document {n}", reason="changed", is_document=True) for n in range(9)]

    runner.source.slim = slim
    with pytest.raises(Misconfigured, match="9 of 9 documents of the listing are set aside"):
        await runner._run_sweep()
    assert runner.source.world.fetched.total() == fetched
    assert runner.deleted == []


# What sources use for one item


def test_an_error_is_logged_once_with_its_place_and_without_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "_logged", {})
    with capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(BadData) as error, reading_data():
                int("Falcon")
    [line] = logs
    assert line["event"] == "source_data_unexpected"
    assert line["at"][-1].startswith("test_isolate.py:")
    assert "Falcon" not in str(line) + str(error.value)


def test_items_are_made_one_by_one_and_the_failed_ones_have_names() -> None:
    items: list[Any] = [{"id": 1, "n": "1"}, {"id": 2, "n": "x"}, {"id": "\n", "n": None}, None, {"id": 5, "n": "5"}]
    made, failed = each(items, lambda item: int(item["n"]), lambda item: item["id"])
    assert made == [1, 5]
    assert failed.keys() == {"2", "number 3", "number 4"}
    assert "ValueError at test_isolate.py" in str(failed["2"])


@pytest.mark.parametrize("error", [Retryable("down"), MemoryError(), OSError(), KeyboardInterrupt()])
def test_errors_that_are_none_of_data_pass_through(error: BaseException) -> None:
    def fail(_item: object) -> None:
        raise error

    with pytest.raises(type(error)):
        each([1], fail, str)


def test_a_field_of_a_wrong_type_is_an_error_of_data_in_one_item_alone() -> None:
    with pytest.raises(BadData, match="external_id of Gone is int"), reading_data():
        Gone(external_id=cast(Any, 17))
    with pytest.raises(BadEntry) as refused:
        Gone(external_id=cast(Any, 17))
    assert isinstance(refused.value, Misconfigured)
    assert isinstance(BadData(""), PenstockError)
