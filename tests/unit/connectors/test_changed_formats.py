"""A source that has changed its format locks nobody out: what is like that for nearly all is no fault of one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from connectors.atlassian import Person
from connectors.confluence.access import GroupReader
from connectors.confluence.model import Readers
from connectors.confluence.options import ConfluenceOptions
from connectors.errors import BadData
from connectors.jira.access import Directory, Findings
from connectors.jira.model import Holders, Project, Rules
from connectors.jira.options import JiraOptions
from connectors.set_aside import SetAside, read_accounts
from connectors.slack.access import Directory as SlackDirectory
from connectors.slack.options import SlackOptions
from connectors.tag_queue import TagQueue
from pipeline.core.errors import Misconfigured


class Wiki:
    def __init__(self, odd: set[str]) -> None:
        self.odd = odd

    async def spaces(self) -> dict[str, str]:
        return {f"S{number}": f"S{number}" for number in range(6)}

    async def readers(self, space: str) -> Readers:
        if space in self.odd:
            raise BadData("its data are not as expected")
        return Readers([Person("1", email="ann@example.com")])

    async def restrictions(self, _space: str, _position: object) -> tuple[dict[str, Any], None]:
        return {}, None


async def holders(odd: set[str]) -> list[str]:
    options = cast(Any, ConfluenceOptions).model_construct(flavour="cloud", principals={}, email_domain=None)
    reader = GroupReader(cast(Any, Wiki(odd)), options, SetAside())
    return [group.tag async for page in reader.pages(None) for group in page.groups]


async def test_spaces_whose_readers_cannot_be_read_are_left_out_unless_nearly_all_are() -> None:
    """All of them were left out at once, and so everybody lost everything."""
    assert len(await holders({"S1", "S2"})) == 4
    with pytest.raises(Misconfigured, match="6 of 6 groups cannot be read, so no membership is changed"):
        await holders({f"S{number}" for number in range(6)})


async def jira_groups(site: SimpleNamespace, tags: Sequence[str], projects: Mapping[str, Project]) -> list[str]:
    options = cast(Any, JiraOptions).model_construct(
        flavour="cloud", principals={}, email_domain=None, anonymous_tag=None
    )
    directory = Directory(cast(Any, site), options, SetAside(), lambda: None)
    pages = directory.pages(TagQueue(tags), projects, Findings(), complete=True)
    return [group.tag async for page in pages for group in page.groups]


async def test_groups_of_jira_that_cannot_be_read_are_left_out_unless_nearly_all_are() -> None:
    async def members(group: str) -> list[Person]:
        if group in odd:
            raise BadData("its data are not as expected")
        return [Person("1", email="ann@example.com")]

    async def held() -> list[str]:
        return await jira_groups(SimpleNamespace(members=members), [f"group:{number}" for number in range(6)], {})

    odd = {"1", "2"}
    assert len(await held()) == 4
    odd = {str(number) for number in range(6)}
    with pytest.raises(Misconfigured, match="6 of 6 groups cannot be read"):
        await held()


async def test_projects_of_jira_whose_permissions_cannot_be_read_are_left_out_unless_nearly_all_are() -> None:
    async def rules(project: Project) -> Rules:
        unreadable = BadData("its data are not as expected") if project.id in odd else None
        return Rules(Holders(has_anyone=unreadable is None), unreadable=unreadable)

    async def held() -> list[str]:
        projects = {str(number): Project(str(number), f"P{number}", "") for number in range(6)}
        return await jira_groups(SimpleNamespace(rules=rules), [f"browse:{id}" for id in projects], projects)

    odd = {"1", "2"}
    assert len(await held()) == 4
    odd = {str(number) for number in range(6)}
    with pytest.raises(Misconfigured, match="6 of 6 groups cannot be read"):
        await held()


@pytest.mark.parametrize(
    ("rows", "expected"), [([], 0), ([1] * 9 + [None], 9), ([None], None), ([None] * 9 + [1], None)]
)
async def test_an_account_that_cannot_be_read_is_none_unless_nearly_all_are(
    rows: list[int | None], expected: int | None
) -> None:
    """A group of nobody counted as read."""

    async def members() -> AsyncIterator[int | None]:
        for row in rows:
            yield row

    if expected is None:
        with pytest.raises(BadData):
            await read_accounts(members(), lambda row: cast(int, row) + 1)
    else:
        assert len(await read_accounts(members(), lambda row: cast(int, row) + 1)) == expected


async def test_nobody_loses_anything_while_the_accounts_of_slack_cannot_be_read() -> None:
    accounts: list[Any] = [{"id": f"U{number}", "name": "ann", "enterprise_user": {}} for number in range(6)]

    async def call(_method: str) -> dict[str, str]:
        return {"team_id": "T1"}

    async def all_rows(_method: str, _field: str) -> list[Any]:
        return accounts

    api = SimpleNamespace(call=call, all_rows=all_rows, name="s")
    directory = SlackDirectory(cast(Any, api), SlackOptions.model_construct(team=None))
    assert len(await directory.users()) == 6
    for account in accounts:
        account["profile"] = {"display_name": Odd()}
    with pytest.raises(Misconfigured, match="6 of 6 accounts cannot be read"):
        await directory.users()


class Odd:
    def __str__(self) -> str:
        raise ValueError("odd")
