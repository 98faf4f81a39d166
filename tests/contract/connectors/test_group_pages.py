"""A listing of all groups that was interrupted continues after the groups that it has read, for each kind that can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from connectors.conform.memory_runner import InMemory
from connectors.declared import options, source_class
from connectors.set_aside import SetAside
from connectors.source import Context, Cursor, Group, PagedGroups
from tests.contract.connectors.test_membership_age import CASES, Case, Counting, unlimited

GROUPS = 40
PAGED = [case for case in CASES if isinstance(source_class(case.kind), PagedGroups)]


def test_the_vendors_with_a_request_for_each_group_list_them_in_pages() -> None:
    assert {case.kind for case in PAGED} == {
        "confluence",
        "connectors.confluence.playground:ConfluenceDataCenter",
        "google-drive",
        "jira",
        "sharepoint",
    }


@pytest.mark.parametrize("case", [pytest.param(case, id=case.kind.rpartition(":")[2]) for case in PAGED])
async def test_an_interrupted_listing_of_groups_requests_the_rest_only(case: Case, tmp_path: Path) -> None:
    kind = source_class(case.kind)
    memory = InMemory()
    async with cast(Any, kind).playground() as play:
        case.add(play, GROUPS)

        def source() -> Any:
            context = Context(name="s", tenant="t", memory=memory, folder=tmp_path, set_aside=SetAside())
            return kind(options(kind, unlimited(kind, play), "s", play.environment), context)

        before, after = source(), source()
        try:
            async for _ in before.slim():
                pass
            play.misbehaving.app = complete = Counting(play.misbehaving.app)
            groups = {group.tag: group async for group in before.groups(None)}
            first: dict[str, Group] = {}
            cursor: Cursor | None = None
            async for page in before.group_pages(None):
                first |= {group.tag: group for group in page.groups}
                cursor = json.loads(json.dumps(page.cursor))
                if sum(tag.startswith("group:") for tag in first) >= GROUPS // 2:
                    break
            play.misbehaving.app = rest = Counting(complete.app)
            second = {group.tag: group async for page in after.group_pages(cursor) for group in page.groups}
        finally:
            await before.close()
            await after.close()
    assert first.keys() & second.keys() == set()
    assert held(first | second) == held(groups)
    assert rest.requests < complete.requests / 2 - GROUPS // 4


def held(groups: dict[str, Group]) -> dict[str, tuple[set[str], set[str]]]:
    return {tag: (set(group.members), set(group.of)) for tag, group in groups.items()}
