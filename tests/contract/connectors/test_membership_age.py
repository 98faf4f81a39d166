"""How old memberships, and what only sweeps show, become at most where a source sends no events: from the requests that
the fakes count, the vendors' rate limits, and the intervals that connectors have without settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from connectors.conform.memory_runner import InMemory
from connectors.declared import BUILT_IN, load, options, source_class
from connectors.fakes import graph_tenant, jira_state
from connectors.fakes.google_drive_corpus import FOLDER, Grant
from connectors.runner.activity import pause_seconds
from connectors.runner.plan import Plan
from connectors.set_aside import SetAside
from connectors.slack.source import POLLED_CHANNELS
from connectors.source import Context, Group

MAX_AGE_SECONDS = 300.0
GROUPS = 5_000
REQUEST_SECONDS = 0.2
"""From a request to its response. An assumption: fakes on this machine are faster than any vendor."""
QUIET_TURNS = 20
"""More than a source needs to send all requests that do not wait for a response."""


def _confluence(play: Any, groups: int) -> None:
    for n in range(groups):
        play.state.groups[f"group{n}"] = {play.bot.account_id, play.ines.account_id}
        page = play.state.add_page("ENG", f"Page {n}", "<p>Text.</p>")
        play.state.restrict(page.id, groups={f"group{n}"})


def _google_drive(play: Any, groups: int) -> None:
    for n in range(groups):
        play.fake.corpus.group(f"group{n}@example.com", play.inside)
        document = play.fake.corpus.add(f"Document {n}", parent=play.drive, exports={"text/markdown": b"Text."})
        play.fake.corpus.share(document.id, Grant(type="group", who=f"group{n}@example.com"))


def _sharepoint(play: Any, groups: int) -> None:
    tenant = play.fake.tenant
    for n in range(groups):
        group = tenant.group(f"group{n}", play.ines)
        file = tenant.add(f"{n}.txt", drive=play.drive, content=b"Text.")
        tenant.share(file.id, [graph_tenant.Grant(group=group)])


def _jira(play: Any, groups: int) -> None:
    for n in range(groups):
        play.state.add_group(f"group{n}", play.bot, play.ines)
    role = play.state.add_role("Readers")
    roles = {role: {f"%group{n}" for n in range(groups)} | {"%staff"}}
    project = play.state.add_project("ALL", jira_state.Grant("projectRole", role), roles=roles)
    play.state.add_issue(project, "One", "Text.")


def _github(play: Any, groups: int) -> None:
    for n in range(groups):
        place = play.fake.repository(f"acme/repository{n}", "ines", "sam")
        play.fake.add(place, "Issue", "One", "Text.")


def _slack(play: Any, groups: int) -> None:
    for n in range(groups):
        play.workspace.channel(f"channel{n}", play.ines, is_private=True)


@dataclass(frozen=True)
class Case:
    kind: str
    add: Callable[[Any, int], None]
    """Adds groups to a playground, each with a document that names it."""
    requests_per_second: float
    """The requests for members that the vendor permits."""
    groups: int = GROUPS
    part_documents: int = 200
    """Documents in each space, project or library, or of each ten folders."""
    options: Mapping[str, Any] = field(default_factory=dict)
    units: Callable[[Any], float] | None = None
    """Returns what the requests to a playground cost, where the vendor does not count requests."""


CASES = (
    # API tokens; OAuth apps have hourly points (developer.atlassian.com/cloud/confluence/rate-limiting).
    Case("confluence", _confluence, 100),
    Case("connectors.confluence.playground:ConfluenceDataCenter", _confluence, 100),
    Case("jira", _jira, 100),
    # 2,400 a minute and user (developers.google.com/workspace/admin/directory/v1/limits).
    Case("google-drive", _google_drive, 40),
    # 3,500 resource units in ten seconds in the smallest tenant, 5 for transitiveMembers (Graph's throttling limits).
    Case("sharepoint", _sharepoint, 70),
    # 12,500 points an hour for an App. Here each repository is a group.
    Case("github", _github, 12_500 / 3_600),
    # 100 a minute for conversations.members (tier 4). More channels need events: `check` says so.
    Case("slack", _slack, 100 / 60, POLLED_CHANNELS),
)


class Counting:
    """An ASGI application that counts the requests to another, and how many of them are concurrent.

    It answers in rounds, once no request arrives any more: as if all responses took the same time, however busy the
    machine is. rounds: their number, the longest chain of requests that wait for each other's responses.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.requests = 0
        self.concurrent = 0
        self.rounds = 0
        self._waiting = 0
        self._round: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        self._waiting += 1
        self.concurrent = max(self.concurrent, self._waiting)
        if self._round is None:
            self._round = asyncio.create_task(self._quiet())
        await asyncio.shield(self._round)
        await self.app(scope, receive, send)

    async def _quiet(self) -> None:
        """Wait for QUIET_TURNS of the event loop, which the source shares, without a request."""
        arrived = turns = 0
        while turns < QUIET_TURNS:
            await asyncio.sleep(0.001)
            arrived, turns = self.requests, turns + 1 if arrived == self.requests else 0
        self._round = None
        self._waiting = 0
        self.rounds += 1


async def members_read(case: Case, groups: int, parts: int, folder: Path) -> Counting:
    """Read the members of all groups once, after a listing. parts: spaces, projects or the like, with documents."""
    kind = source_class(case.kind)
    async with cast(Any, kind).playground() as play:
        case.add(play, groups)
        if case.kind in PARTS:
            PARTS[case.kind].add(play, parts)
        folder.mkdir()
        context = Context(name="s", tenant="t", memory=InMemory(), folder=folder, set_aside=SetAside())
        source = kind(options(kind, unlimited(kind, play), "s", play.environment), context)
        try:
            async for _ in source.slim():
                pass
            counting = play.misbehaving.app = Counting(play.misbehaving.app)
            read: list[Group] = [group async for group in source.groups(None)]
        finally:
            await source.close()
    assert sum(bool(group.members) for group in read) >= groups
    return counting


def unlimited(kind: Any, play: Any) -> dict[str, Any]:
    """Return the options of a playground with pages as large as they are without settings."""
    sizes = [name for name in play.options if name.endswith(("page_size", "rows_per_request"))]
    return {**play.options, **{name: kind.Options.model_fields[name].default for name in sizes}}


DOCUMENTS = 100_000
FEW_PARTS, MANY_PARTS = 8, 16
"""As many as are listed at the same time, and twice as many."""


def _spaces(play: Any, parts: int) -> None:
    for n in range(parts):
        play.state.add_space(f"S{n}", users={play.bot.account_id})
        for m in range(200):
            play.state.add_page(f"S{n}", f"Page {n} {m}", "<p>Text.</p>")


def _folders(play: Any, parts: int) -> None:
    """Ten folders in a part, and files of all folders on each page of the listing."""
    corpus = play.fake.corpus
    folders = [corpus.add(f"Folder {n}", parent=play.drive, mime_type=FOLDER).id for n in range(10 * parts)]
    for n in range(230 * parts):
        corpus.add(f"File {n}", parent=folders[n % len(folders)], exports={"text/markdown": b"Text."})


def _libraries(play: Any, parts: int) -> None:
    """In each library, the permissions of its root and of one folder."""
    tenant = play.fake.tenant
    site = tenant.site_of(play.drive)
    for n in range(parts):
        library = tenant.drive(site, f"Library {n}", graph_tenant.Grant(user=play.ines))
        folder = tenant.add("Folder", drive=library, folder=True, grants=[graph_tenant.Grant(group=play.staff)]).id
        for m in range(600):
            tenant.add(f"{m}.txt", drive=library, parent=folder if m % 2 else "", content=b"Text.")


def _resource_units(play: Any) -> float:
    paths = [path for _, path in play.fake.requests]
    return sum(5 if path.endswith("/permissions") else 0 if path.endswith("/$batch") else 1 for path in paths)


def _projects(play: Any, parts: int) -> None:
    role = play.state.add_role("Readers")
    for n in range(parts):
        grant = jira_state.Grant("projectRole", role)
        project = play.state.add_project(f"P{n}", grant, roles={role: {"%staff"}})
        for m in range(200):
            play.state.add_issue(project, f"Issue {n} {m}", "Text.")


SWEPT = (
    Case("confluence", _spaces, 100),
    Case("connectors.confluence.playground:ConfluenceDataCenter", _spaces, 100),
    Case("jira", _projects, 100),
    # 12,000 a minute for a project (Drive's usage limits). Google returns at most 460 files with their folders.
    Case("google-drive", _folders, 200, part_documents=230, options={"sweep_page_size": 460}),
    # 1,250 resource units a minute for an application in the smallest tenant (SharePoint's throttling limits).
    Case(
        "sharepoint",
        _libraries,
        1_250 / 60,
        part_documents=600,
        options={"permissions": "hierarchy"},
        units=_resource_units,
    ),
)
"""The rate is that of a single endpoint where endpoints have limits of their own."""
PARTS = {case.kind: case for case in SWEPT}


async def swept(case: Case, parts: int, folder: Path) -> tuple[Counting, float]:
    """List everything once. Returns the requests, and what they cost."""
    kind = source_class(case.kind)
    async with cast(Any, kind).playground() as play:
        case.add(play, parts)
        folder.mkdir()
        context = Context(name="s", tenant="t", memory=InMemory(), folder=folder, set_aside=SetAside())
        source = kind(options(kind, unlimited(kind, play) | case.options, "s", play.environment), context)
        counting = play.misbehaving.app = Counting(play.misbehaving.app)
        try:
            listed = sum([len(page) async for page in source.slim()])
        finally:
            await source.close()
        cost = counting.requests if case.units is None else case.units(play)
    assert listed >= parts * case.part_documents
    return counting, cost


@pytest.mark.parametrize("case", [pytest.param(case, id=case.kind.rpartition(":")[2]) for case in SWEPT])
async def test_what_only_sweeps_show_is_noticed_within_five_minutes_of_100_000_documents(
    case: Case, tmp_path: Path
) -> None:
    few, few_cost = await swept(case, FEW_PARTS, tmp_path / "few")
    many, many_cost = await swept(case, MANY_PARTS, tmp_path / "many")

    def of_all(few: float, many: float) -> float:
        return few + (many - few) / (MANY_PARTS - FEW_PARTS) * (DOCUMENTS / case.part_documents - FEW_PARTS)

    requests, cost = of_all(few.requests, many.requests), of_all(few_cost, many_cost)
    seconds = max(cost / case.requests_per_second, of_all(few.rounds, many.rounds) * REQUEST_SECONDS)
    intervals = plan("confluence" if "confluence" in case.kind else case.kind, tmp_path)
    # A poll may have to start the sweep: the log of changes names the folder that was moved, and nothing below it.
    age = max(seconds + pause_seconds(intervals.sweep_seconds, after=seconds), intervals.poll_seconds + seconds)
    if intervals.kind in DELETED_BY_SWEEP:  # a document is known to be missing when a whole sweep has not listed it
        age = 2 * seconds + pause_seconds(intervals.sweep_seconds, after=seconds)
    print(f"{case.kind}: {requests:,.0f} requests, {many.concurrent} at once, {seconds:.0f} s, at most {age:.0f} s old")
    assert age <= MAX_AGE_SECONDS


@pytest.mark.parametrize("case", [pytest.param(case, id=case.kind.rpartition(":")[2]) for case in CASES])
async def test_a_changed_membership_is_noticed_within_five_minutes_without_an_event(case: Case, tmp_path: Path) -> None:
    base = await members_read(case, 100, FEW_PARTS, tmp_path / "base")
    groups = await members_read(case, 200, FEW_PARTS, tmp_path / "groups")
    parts = await members_read(case, 100, MANY_PARTS, tmp_path / "parts") if case.kind in PARTS else base
    part_count = DOCUMENTS / PARTS[case.kind].part_documents if case.kind in PARTS else FEW_PARTS

    def of_all(count: Callable[[Counting], int]) -> float:
        per_group = (count(groups) - count(base)) / 100
        per_part = (count(parts) - count(base)) / (MANY_PARTS - FEW_PARTS)
        return count(base) + per_group * (case.groups - 100) + per_part * (part_count - FEW_PARTS)

    requests = of_all(lambda counting: counting.requests)
    rounds = max(of_all(lambda counting: counting.rounds), requests / parts.concurrent)
    seconds = max(requests / case.requests_per_second, rounds * REQUEST_SECONDS)
    age = seconds + pause_seconds(plan(case.kind, tmp_path).groups_seconds, after=seconds)
    print(
        f"{case.kind}: {requests:,.0f} requests, {parts.concurrent} at once, {seconds:.0f} s, at most {age:.0f} s old"
    )
    assert age <= MAX_AGE_SECONDS


DELETED_BY_SWEEP = ("confluence", "jira")
"""Kinds of which a deleted (in Confluence: purged) document is in no list of changes."""
KINDS_WITH_SWEEPS = ("confluence", "database", "git", "google-drive", "jira", "sharepoint")
"""Kinds in which some changes are shown by sweeps alone."""


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_every_kind_is_read_often_enough_for_five_minutes(kind: str, tmp_path: Path) -> None:
    """At most half of the time is the interval: a reading of a large source takes the other half."""
    intervals = plan(kind, tmp_path)
    assert 2 * intervals.poll_seconds <= MAX_AGE_SECONDS
    assert 2 * intervals.groups_seconds <= MAX_AGE_SECONDS
    if kind in KINDS_WITH_SWEEPS:
        assert intervals.sweep_seconds < MAX_AGE_SECONDS


def plan(kind: str, folder: Path) -> Plan:
    """Return the intervals of a connector without settings."""
    file = folder / "connectors.toml"
    file.write_text(f'[connector.s]\nkind = "{kind}"\n')
    return load(file, {}).plan("s")
