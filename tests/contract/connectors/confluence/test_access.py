"""Access to Confluence's content is never wider than in Confluence."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from connectors.atlassian import principal
from connectors.fakes.confluence import Flavour
from connectors.fakes.confluence_state import Item, User
from connectors.runner.membership import GroupMembers, tags_by_principal
from connectors.source import Cursor, CursorExpired, Document, Group, GroupPage, Listed, Unreadable
from pipeline.core.errors import Misconfigured, Retryable
from tests.support.connectors.confluence_kit import FLAVOURS, Wiki, wiki


@pytest.fixture(params=FLAVOURS)
async def one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Wiki]:
    flavour: Flavour = request.param
    async with wiki(flavour, tmp_path) as made:
        yield made


def name(user: User) -> str:
    return f"{user.username}@example.com"


def tags_of(groups: Mapping[str, Group], who: str) -> frozenset[str]:
    """As the runner resolves them."""
    from datetime import UTC, datetime

    held = {
        tag: GroupMembers(tag, tuple(group.members), tuple(group.of), datetime.now(UTC))
        for tag, group in groups.items()
    }
    return tags_by_principal(held).get(who, frozenset())


def is_readable_with(entry: Listed | Document | Unreadable, tags: frozenset[str]) -> bool:
    return bool(set(entry.acl_tags) & tags) and set(entry.required_tags) <= tags


async def test_a_space_tag_holds_the_users_and_groups_with_read_permission(one: Wiki) -> None:
    groups = await one.groups()
    staff = next(tag for tag in groups if tag.startswith("group:"))
    assert groups["space:ENG"].members == [name(one.bob)]
    assert groups["space:ENG"].of == [staff]
    assert set(groups[staff].members) == {name(one.bot), name(one.ann)}
    assert set(groups) == {"space:ENG", staff}


async def test_a_page_requires_the_restrictions_of_all_its_ancestors(one: Wiki) -> None:
    top = one.page("Top")
    open_ = one.page("Open", parent=top.id)
    deep = one.page("Deep", parent=open_.id)
    file = one.state.attach(deep.id, "a.txt", b"words", "text/plain")
    one.state.restrict(top.id, users={one.bot.account_id, one.bob.account_id})
    one.state.restrict(deep.id, groups={"staff"})

    read, groups = await one.full(), await one.groups()

    assert read[open_.id].required_tags == (f"restriction:{top.id}",)  # type: ignore[union-attr]
    assert read[deep.id].required_tags == (f"restriction:{top.id}", f"restriction:{deep.id}")  # type: ignore[union-attr]
    assert read[file.id].required_tags == read[deep.id].required_tags  # type: ignore[union-attr]
    assert set(groups[f"restriction:{top.id}"].members) == {name(one.bot), name(one.bob)}
    assert groups[f"restriction:{deep.id}"].of == [tag for tag in groups if tag.startswith("group:")]


async def test_an_edit_restriction_does_not_restrict_reading(one: Wiki) -> None:
    page = one.page("Top")
    page.update.users.add(one.bot.account_id)
    assert (await one.full())[page.id].required_tags == ()  # type: ignore[union-attr]
    assert f"restriction:{page.id}" not in await one.groups()


async def test_a_sweep_applies_a_parents_new_restriction_to_all_descendants(one: Wiki) -> None:
    top = one.page("Top")
    below = one.page("Below", parent=top.id)
    file = one.state.attach(below.id, "a.txt", b"words", "text/plain")
    before = await one.slim()
    one.state.restrict(top.id, users={one.bot.account_id})
    after = await one.slim()
    for id_ in (top.id, below.id, file.id):
        assert before[id_].required_tags == ()
        assert after[id_].required_tags == (f"restriction:{top.id}",)
        assert before[id_].revision == after[id_].revision  # nothing is read again for it


async def test_in_random_page_trees_the_tags_admit_exactly_the_users_that_confluence_admits(one: Wiki) -> None:
    """Against the fake's own idea of who sees what."""
    dice = random.Random(5)
    people = [one.bot, one.ann, one.bob, *(one.state.add_user(f"user{n}") for n in range(3))]
    one.bot.sees_all = True
    for n in range(3):
        one.state.groups[f"group{n}"] = {user.account_id for user in people if dice.random() < 0.5}
    one.state.add_space("OPS", groups={"group0", "group1"}, users={people[3].account_id})
    items: list[Item] = []
    for n in range(25):
        parent = dice.choice(items) if items and dice.random() < 0.8 else None
        space = parent.space if parent else dice.choice(("ENG", "OPS"))
        kind = "folder" if one.fake.cloud and dice.random() < 0.25 else "page"
        items.append(
            one.state.add_page(space, f"Page {n}", "<p>x</p>", parent=parent.id if parent else None, kind=kind)
        )
        if dice.random() < 0.4:
            users = {user.account_id for user in people if dice.random() < 0.4}
            groups = {group for group in ("group0", "group1", "group2") if dice.random() < 0.3}
            one.state.restrict(items[-1].id, users=users, groups=groups)
    one.source = one.connect(page_size=50)

    listed, groups = await one.slim(), await one.groups()

    pages = [item for item in items if item.kind == "page"]
    assert set(listed) == {item.id for item in pages}
    for user in people:
        user.sees_all = False
        tags = tags_of(groups, name(user))
        for item in pages:
            assert is_readable_with(listed[item.id], tags) == one.state.may_see(user, item), (user.username, item.title)


async def test_a_user_removed_from_a_group_loses_its_tags(one: Wiki) -> None:
    before = await one.groups()
    one.state.groups["staff"].discard(one.ann.account_id)
    after = await one.groups()
    assert "space:ENG" in tags_of(before, name(one.ann))
    assert tags_of(after, name(one.ann)) == frozenset()


async def test_reading_requested_tags_returns_them_and_the_groups_they_name(one: Wiki) -> None:
    page = one.page("Top")
    one.state.groups["board"] = {one.bot.account_id}
    one.state.restrict(page.id, groups={"board"}, users={one.bob.account_id})
    groups = await one.groups([f"restriction:{page.id}", "restriction:../../x", "restriction:999", "group:nobody"])
    assert set(groups) == {f"restriction:{page.id}", "group:board"}
    one.state.restrict(page.id)
    assert await one.groups([f"restriction:{page.id}"]) == {}


async def test_all_users_of_a_restriction_are_read_over_several_pages_of_results(one: Wiki) -> None:
    page = one.page("Top")
    many = {one.state.add_user(f"user{n}").account_id for n in range(230)}
    one.state.restrict(page.id, users=many | {one.bot.account_id})
    groups = await one.groups([f"restriction:{page.id}"])
    assert len(groups[f"restriction:{page.id}"].members) == 231


async def test_restrictions_that_a_listing_includes_are_not_requested_one_by_one(one: Wiki) -> None:
    pages = [one.page(f"Page {n}") for n in range(30)]
    for page in pages:
        one.state.restrict(page.id, groups={"staff"}, users={one.bob.account_id})
    crowded = one.page("Page of many")
    one.state.restrict(
        crowded.id, users={one.bot.account_id, *(one.state.add_user(f"u{n}").account_id for n in range(230))}
    )
    one.fake.requests.clear()
    groups = await one.groups()
    for page in pages:
        group = groups[f"restriction:{page.id}"]
        assert (group.members, list(group.of)) == ([name(one.bob)], ["group:staff"])
    assert len(groups[f"restriction:{crowded.id}"].members) == 231, "a listing includes 200 at most"
    single = [request for request in one.fake.requests if "/restriction/byOperation" in request]
    assert single
    assert all(crowded.id in request for request in single)


def members_requested(one: Wiki) -> set[str]:
    """Return the groups whose members were requested since the last call."""
    groups = {
        request.partition("/group/")[2].partition("/")[0] for request in one.fake.requests if "/group/" in request
    }
    one.fake.requests.clear()
    return groups


async def extend(parts: list[GroupPage], pages: AsyncIterator[GroupPage]) -> None:
    async for part in pages:
        parts.append(part)


async def test_a_listing_of_groups_continues_after_the_half_that_was_read(one: Wiki) -> None:
    one.state.groups |= {f"group{n:02}": {one.bob.account_id} for n in range(40)}
    one.state.add_space("BIG", groups=set(one.state.groups), users={one.bot.account_id})
    page = one.page("Restricted")
    one.state.restrict(page.id, users={one.bot.account_id}, groups={"staff"})
    complete = await one.groups()
    one.fake.requests.clear()
    first: dict[str, Group] = {}
    cursor: Cursor | None = None
    async for part in one.source.group_pages(None):
        first |= {group.tag: group for group in part.groups}
        cursor = json.loads(json.dumps(part.cursor))
        if sum(tag.startswith("group:") for tag in first) >= 20:
            break
    read, one.source = members_requested(one), one.connect()
    rest = {group.tag: group async for part in one.source.group_pages(cursor) for group in part.groups}
    assert members_requested(one) == one.state.groups.keys() - read
    assert first.keys() & rest.keys() == set()
    assert first | rest == complete


async def test_a_listing_of_groups_continues_after_any_of_its_pages(one: Wiki) -> None:
    one.source = one.connect(page_size=50)
    for n in range(40):
        one.state.restrict(one.page(f"Restricted {n}").id, users={one.bot.account_id}, groups={f"group{n:02}"})
        one.state.groups[f"group{n:02}"] = {one.ann.account_id}
    pages: list[GroupPage] = []
    await extend(pages, one.source.group_pages(None))
    complete = {group.tag: group for page in pages for group in page.groups}
    assert len(complete) == 1 + 2 * 40 + 1
    assert max(len(page.groups) for page in pages) < 40
    for n, page in enumerate(pages):
        rest: list[GroupPage] = []
        await extend(rest, one.connect(page_size=50).group_pages(json.loads(json.dumps(page.cursor))))
        groups = [group for part in [*pages[: n + 1], *rest] for group in part.groups]
        assert len(groups) == len(complete), "nothing is read twice"
        assert {group.tag: group for group in groups} == complete


async def test_a_group_that_fails_for_a_moment_is_read_again_without_the_others(one: Wiki) -> None:
    one.state.groups |= {f"group{n:02}": {one.bob.account_id} for n in range(20)}
    one.state.add_space("BIG", groups=set(one.state.groups), users={one.bot.account_id})
    one.fake.faults.broken.add("/group/group03/")
    one.source = one.connect(patient=False)
    cursor: Cursor | None = None
    for attempt in range(2):
        parts: list[GroupPage] = []
        with pytest.raises(Retryable):
            await extend(parts, one.source.group_pages(cursor))
        cursor = parts[-1].cursor
        assert members_requested(one) == ({"group03"} if attempt else one.state.groups.keys())
    assert not [group async for part in one.source.group_pages(cursor) for group in part.groups]
    assert [reason for part, reason in one.context.set_aside.reasons().items() if "members of group" in part]


async def test_groups_of_which_none_can_be_read_keep_their_members(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as one:
        one.fake.faults.broken |= {"/group/", "/spaces/"}
        one.source = one.connect(patient=False)
        cursor: Cursor | None = None
        for _ in range(5):
            parts: list[GroupPage] = []
            with pytest.raises(Retryable):
                await extend(parts, one.source.group_pages(cursor))
            cursor = parts[-1].cursor
        assert one.context.set_aside.reasons() == {}


@pytest.mark.parametrize(
    "cursor", [{}, {"tags": 3, "listings": {}, "read": 0}, {"tags": [], "listings": [], "next": None, "read": 0}]
)
async def test_a_malformed_cursor_of_groups_counts_as_expired(one: Wiki, cursor: Cursor) -> None:
    with pytest.raises(CursorExpired):
        _ = [part async for part in one.source.group_pages(cursor)]


async def test_a_principal_is_the_email_address_or_else_the_account(one: Wiki) -> None:
    one.bob.shows_email = False
    one.source = one.connect(**({} if one.fake.cloud else {"email_domain": None}))
    members = (await one.groups())["space:ENG"].members
    assert members == [f"account:{one.bob.account_id if one.fake.cloud else 'bob'}"]
    key = one.bob.account_id if one.fake.cloud else "bob"
    one.source = one.connect(principals={key: "Bob@Elsewhere.Example"})
    assert (await one.groups())["space:ENG"].members == ["bob@elsewhere.example"]


async def test_a_page_whose_restrictions_are_missing_from_responses_is_readable_by_no_one(one: Wiki) -> None:
    top = one.page("Top")
    page = one.page("Below", parent=top.id)
    one.state.restrict(top.id, users={one.bot.account_id})
    one.fake.faults.lose_restrictions = True
    one.fake.faults.denied = {"byOperation"}
    for entry in (*(await one.full()).values(), *await one.source.fetch([page.id])):
        assert isinstance(entry, Unreadable)
        assert (entry.code, entry.acl_tags) == ("access_unknown", ())
    assert all(listed.acl_tags == () for listed in (await one.slim()).values())


async def test_a_space_whose_permissions_cannot_be_read_has_no_group(one: Wiki) -> None:
    one.fake.faults.denied = {"/permissions"}
    groups = await one.groups()
    assert "space:ENG" not in groups


async def test_a_group_whose_members_cannot_be_read_is_left_out(one: Wiki) -> None:
    one.fake.faults.denied = {"/member"}
    groups = await one.groups()
    assert [tag for tag in groups if tag.startswith("group:")] == []
    assert groups["space:ENG"].members == [name(one.bob)]


async def test_a_revoked_token_raises_misconfigured_and_reports_no_page_gone(one: Wiki) -> None:
    page = one.page("Top")
    one.fake.credentials.clear()
    for asking in (one.source.fetch([page.id]), one.full(), one.slim(), one.groups(), one.source.start()):
        with pytest.raises(Misconfigured, match="token"):
            await asking


async def test_a_page_restricted_away_from_the_connectors_account_is_no_longer_read(one: Wiki) -> None:
    page = one.page("Secret")
    assert set(await one.full()) == {page.id}
    one.state.restrict(page.id, users={one.bob.account_id})
    assert await one.full() == {}
    assert await one.slim() == {}


async def test_access_is_read_again_for_every_page_of_results(one: Wiki) -> None:
    """A restriction set while a crawl is under way holds from the next page on."""
    top = one.page("Top")
    below = [one.page(f"Below {n}", parent=top.id) for n in range(6)]
    pages = one.source.full(None)
    first = await anext(pages)
    assert all(entry.required_tags == () for entry in first.entries)  # type: ignore[union-attr]
    one.state.restrict(top.id, users={one.bot.account_id})
    rest = [entry async for page in pages for entry in page.entries]
    assert {entry.external_id for entry in rest} <= {item.id for item in below}
    assert all(entry.required_tags == (f"restriction:{top.id}",) for entry in rest)  # type: ignore[union-attr]


async def test_restrictions_on_cloud_folders_apply_to_the_pages_below(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as one:
        top = one.page("Top")
        folder = one.page("Folder", parent=top.id, kind="folder")
        inner = one.page("Inner folder", parent=folder.id, kind="folder")
        middle = one.page("Middle", parent=inner.id)
        deep = one.page("Deep", parent=middle.id)
        one.state.restrict(folder.id, users={one.bot.account_id, one.ann.account_id})
        for listed in (await one.slim()).values(), (await one.full()).values():
            required = {entry.external_id: entry.required_tags for entry in listed}  # type: ignore[union-attr]
            assert required[deep.id] == required[middle.id] == (f"restriction:{folder.id}",)
            assert required[top.id] == ()
        assert set((await one.groups())[f"restriction:{folder.id}"].members) == {name(one.bot), name(one.ann)}


async def test_a_page_not_yet_in_the_search_index_has_its_parents_restrictions(tmp_path: Path) -> None:
    from datetime import timedelta

    async with wiki("cloud", tmp_path) as one:
        one.fake.index_delay = timedelta(hours=1)
        top = one.page("Top")
        page = one.page("Below", parent=top.id)
        one.state.restrict(top.id, users={one.bot.account_id})
        assert (await one.slim())[page.id].required_tags == (f"restriction:{top.id}",)
        assert f"restriction:{top.id}" in await one.groups()


async def test_anonymous_access_admits_only_the_group_that_the_settings_name(tmp_path: Path) -> None:
    async with wiki("data-center", tmp_path) as one:
        one.state.spaces["ENG"].anonymous = True
        assert (await one.groups())["space:ENG"].of == ["group:staff"]
        one.source = one.connect(anonymous_tag="group:everybody")
        assert (await one.groups())["space:ENG"].of == ["group:everybody", "group:staff"]
        one.fake.faults.anonymous_apart = True
        assert (await one.groups())["space:ENG"].of == ["group:everybody", "group:staff"]
        one.fake.faults.denied.add("permissions/anonymous")
        assert (await one.groups())["space:ENG"].of == ["group:staff"]


async def test_a_role_of_a_space_admits_its_holders_only_if_it_is_known_to_include_viewing(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as one:
        space = one.state.add_space("NEW")
        one.state.roles = {"viewer": ("read/space", "read/page"), "exporter": ("export/space",)}
        one.state.groups["readers"] = {one.ann.account_id}
        space.assignments = [
            ("USER", one.bot.account_id, "viewer"),
            ("GROUP", "readers", "viewer"),
            ("GROUP", "staff", "exporter"),
            ("USER", one.bob.account_id, "removed-role"),
        ]
        groups = await one.groups()
        assert groups["space:NEW"].members == [name(one.bot)]
        assert groups["space:NEW"].of == ["group:readers"]
        assert groups["group:readers"].members == [name(one.ann)]
        assert groups["space:ENG"].members == [name(one.bob)]  # by its permissions alone


async def test_a_role_of_all_licensed_users_admits_only_the_group_that_the_settings_name(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as one:
        space = one.state.add_space("NEW")
        one.state.roles = {"viewer": ("read/space",)}
        space.assignments = [
            ("ACCESS_CLASS", "all-licensed-users", "viewer"),
            ("ACCESS_CLASS", "all-product-admins", "viewer"),
        ]
        assert (await one.groups())["space:NEW"].of == []
        assert [problem.code for problem in await one.source.check()] == ["licensed"]
        one.source = one.connect(licensed_tag="group:staff")
        assert (await one.groups())["space:NEW"].of == ["group:staff"]
        assert await one.source.check() == []


async def test_all_assignments_of_roles_are_read_over_several_pages_of_results(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as one:
        space = one.state.add_space("NEW")
        one.state.roles = {"viewer": ("read/space",)}
        users = [one.state.add_user(f"user{n}") for n in range(300)]
        space.assignments = [("USER", user.account_id, "viewer") for user in (one.bot, *users)]
        assert len((await one.groups())["space:NEW"].members) == 301


def test_a_user_name_is_an_email_address_only_in_the_configured_domain() -> None:
    from connectors.atlassian import Person
    from connectors.confluence import ConfluenceOptions

    def named(username: str, **options: str) -> str:
        given = ConfluenceOptions(flavour="data-center", base_url="https://wiki.example", token="t", **options)  # type: ignore[arg-type]
        return principal(Person("k1", username=username), given)

    assert named("Ann", email_domain="corp.example") == "ann@corp.example"
    assert named("ann@corp.example", email_domain="corp.example") == "ann@corp.example"
    assert named("ann@elsewhere.example", email_domain="corp.example") == "account:ann@elsewhere.example"
    assert named("boss@corp.example") == "account:boss@corp.example"
