"""Access to Confluence's content is never wider than in Confluence."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from connectors.atlassian import principal
from connectors.fakes.confluence_state import Item, User
from connectors.runner.membership import GroupMembers, tags_by_principal
from connectors.source import Cursor, CursorExpired, Document, Group, GroupPage, Listed, Unreadable
from pipeline.core.errors import Misconfigured, Retryable
from tests.support.connectors.confluence_kit import Wiki, wiki


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


async def test_a_space_tag_holds_the_users_and_groups_with_read_permission(site: Wiki) -> None:
    groups = await site.groups()
    staff = next(tag for tag in groups if tag.startswith("group:"))
    assert groups["space:ENG"].members == [name(site.bob)]
    assert groups["space:ENG"].of == [staff]
    assert set(groups[staff].members) == {name(site.bot), name(site.ann)}
    assert set(groups) == {"space:ENG", staff}


async def test_a_page_requires_the_restrictions_of_all_its_ancestors(site: Wiki) -> None:
    top = site.page("Top")
    open_ = site.page("Open", parent=top.id)
    deep = site.page("Deep", parent=open_.id)
    file = site.state.attach(deep.id, "a.txt", b"words", "text/plain")
    site.state.restrict(top.id, users={site.bot.account_id, site.bob.account_id})
    site.state.restrict(deep.id, groups={"staff"})

    read, groups = await site.full(), await site.groups()

    assert read[open_.id].required_tags == (f"restriction:{top.id}",)  # type: ignore[union-attr]
    assert read[deep.id].required_tags == (f"restriction:{top.id}", f"restriction:{deep.id}")  # type: ignore[union-attr]
    assert read[file.id].required_tags == read[deep.id].required_tags  # type: ignore[union-attr]
    assert set(groups[f"restriction:{top.id}"].members) == {name(site.bot), name(site.bob)}
    assert groups[f"restriction:{deep.id}"].of == [tag for tag in groups if tag.startswith("group:")]


async def test_an_edit_restriction_does_not_restrict_reading(site: Wiki) -> None:
    page = site.page("Top")
    page.update.users.add(site.bot.account_id)
    assert (await site.full())[page.id].required_tags == ()  # type: ignore[union-attr]
    assert f"restriction:{page.id}" not in await site.groups()


async def test_a_sweep_applies_a_parents_new_restriction_to_all_descendants(site: Wiki) -> None:
    top = site.page("Top")
    below = site.page("Below", parent=top.id)
    file = site.state.attach(below.id, "a.txt", b"words", "text/plain")
    before = await site.slim()
    site.state.restrict(top.id, users={site.bot.account_id})
    after = await site.slim()
    for id_ in (top.id, below.id, file.id):
        assert before[id_].required_tags == ()
        assert after[id_].required_tags == (f"restriction:{top.id}",)
        assert before[id_].revision == after[id_].revision  # nothing is read again for it


async def test_in_random_page_trees_the_tags_admit_exactly_the_users_that_confluence_admits(site: Wiki) -> None:
    """Against the fake's own idea of who sees what."""
    dice = random.Random(5)
    people = [site.bot, site.ann, site.bob, *(site.state.add_user(f"user{n}") for n in range(3))]
    site.bot.sees_all = True
    for n in range(3):
        site.state.groups[f"group{n}"] = {user.account_id for user in people if dice.random() < 0.5}
    site.state.add_space("OPS", groups={"group0", "group1"}, users={people[3].account_id})
    items: list[Item] = []
    for n in range(25):
        parent = dice.choice(items) if items and dice.random() < 0.8 else None
        space = parent.space if parent else dice.choice(("ENG", "OPS"))
        kind = "folder" if site.fake.cloud and dice.random() < 0.25 else "page"
        items.append(
            site.state.add_page(space, f"Page {n}", "<p>x</p>", parent=parent.id if parent else None, kind=kind)
        )
        if dice.random() < 0.4:
            users = {user.account_id for user in people if dice.random() < 0.4}
            groups = {group for group in ("group0", "group1", "group2") if dice.random() < 0.3}
            site.state.restrict(items[-1].id, users=users, groups=groups)
    site.source = site.connect(page_size=50)

    listed, groups = await site.slim(), await site.groups()

    pages = [item for item in items if item.kind == "page"]
    assert set(listed) == {item.id for item in pages}
    for user in people:
        user.sees_all = False
        tags = tags_of(groups, name(user))
        for item in pages:
            assert is_readable_with(listed[item.id], tags) == site.state.may_see(user, item), (
                user.username,
                item.title,
            )


async def test_a_user_removed_from_a_group_loses_its_tags(site: Wiki) -> None:
    before = await site.groups()
    site.state.groups["staff"].discard(site.ann.account_id)
    after = await site.groups()
    assert "space:ENG" in tags_of(before, name(site.ann))
    assert tags_of(after, name(site.ann)) == frozenset()


async def test_reading_requested_tags_returns_them_and_the_groups_they_name(site: Wiki) -> None:
    page = site.page("Top")
    site.state.groups["board"] = {site.bot.account_id}
    site.state.restrict(page.id, groups={"board"}, users={site.bob.account_id})
    groups = await site.groups([f"restriction:{page.id}", "restriction:../../x", "restriction:999", "group:nobody"])
    assert set(groups) == {f"restriction:{page.id}", "group:board"}
    site.state.restrict(page.id)
    assert await site.groups([f"restriction:{page.id}"]) == {}


async def test_all_users_of_a_restriction_are_read_over_several_pages_of_results(site: Wiki) -> None:
    page = site.page("Top")
    many = {site.state.add_user(f"user{n}").account_id for n in range(230)}
    site.state.restrict(page.id, users=many | {site.bot.account_id})
    groups = await site.groups([f"restriction:{page.id}"])
    assert len(groups[f"restriction:{page.id}"].members) == 231


async def test_restrictions_that_a_listing_includes_are_not_requested_one_by_one(site: Wiki) -> None:
    pages = [site.page(f"Page {n}") for n in range(30)]
    for page in pages:
        site.state.restrict(page.id, groups={"staff"}, users={site.bob.account_id})
    crowded = site.page("Page of many")
    site.state.restrict(
        crowded.id, users={site.bot.account_id, *(site.state.add_user(f"u{n}").account_id for n in range(230))}
    )
    site.fake.requests.clear()
    groups = await site.groups()
    for page in pages:
        group = groups[f"restriction:{page.id}"]
        assert (group.members, list(group.of)) == ([name(site.bob)], ["group:staff"])
    assert len(groups[f"restriction:{crowded.id}"].members) == 231, "a listing includes 200 at most"
    single = [request for request in site.fake.requests if "/restriction/byOperation" in request]
    assert single
    assert all(crowded.id in request for request in single)


def members_requested(site: Wiki) -> set[str]:
    """Return the groups whose members were requested since the last call."""
    groups = {
        request.partition("/group/")[2].partition("/")[0] for request in site.fake.requests if "/group/" in request
    }
    site.fake.requests.clear()
    return groups


async def extend(parts: list[GroupPage], pages: AsyncIterator[GroupPage]) -> None:
    async for part in pages:
        parts.append(part)


async def test_a_listing_of_groups_continues_after_the_half_that_was_read(site: Wiki) -> None:
    site.state.groups |= {f"group{n:02}": {site.bob.account_id} for n in range(40)}
    site.state.add_space("BIG", groups=set(site.state.groups), users={site.bot.account_id})
    page = site.page("Restricted")
    site.state.restrict(page.id, users={site.bot.account_id}, groups={"staff"})
    complete = await site.groups()
    site.fake.requests.clear()
    first: dict[str, Group] = {}
    cursor: Cursor | None = None
    async for part in site.source.group_pages(None):
        first |= {group.tag: group for group in part.groups}
        cursor = json.loads(json.dumps(part.cursor))
        if sum(tag.startswith("group:") for tag in first) >= 20:
            break
    read, site.source = members_requested(site), site.connect()
    rest = {group.tag: group async for part in site.source.group_pages(cursor) for group in part.groups}
    assert members_requested(site) == site.state.groups.keys() - read
    assert first.keys() & rest.keys() == set()
    assert first | rest == complete


async def test_a_listing_of_groups_continues_after_any_of_its_pages(site: Wiki) -> None:
    site.source = site.connect(page_size=50)
    for n in range(40):
        site.state.restrict(site.page(f"Restricted {n}").id, users={site.bot.account_id}, groups={f"group{n:02}"})
        site.state.groups[f"group{n:02}"] = {site.ann.account_id}
    pages: list[GroupPage] = []
    await extend(pages, site.source.group_pages(None))
    complete = {group.tag: group for page in pages for group in page.groups}
    assert len(complete) == 1 + 2 * 40 + 1
    assert max(len(page.groups) for page in pages) < 40
    for n, page in enumerate(pages):
        rest: list[GroupPage] = []
        await extend(rest, site.connect(page_size=50).group_pages(json.loads(json.dumps(page.cursor))))
        groups = [group for part in [*pages[: n + 1], *rest] for group in part.groups]
        assert len(groups) == len(complete), "nothing is read twice"
        assert {group.tag: group for group in groups} == complete


async def test_a_group_that_fails_for_a_moment_is_read_again_without_the_others(site: Wiki) -> None:
    site.state.groups |= {f"group{n:02}": {site.bob.account_id} for n in range(20)}
    site.state.add_space("BIG", groups=set(site.state.groups), users={site.bot.account_id})
    site.fake.faults.broken.add("/group/group03/")
    site.source = site.connect(patient=False)
    cursor: Cursor | None = None
    for attempt in range(2):
        parts: list[GroupPage] = []
        with pytest.raises(Retryable):
            await extend(parts, site.source.group_pages(cursor))
        cursor = parts[-1].cursor
        assert members_requested(site) == ({"group03"} if attempt else site.state.groups.keys())
    assert not [group async for part in site.source.group_pages(cursor) for group in part.groups]
    assert [reason for part, reason in site.context.set_aside.reasons().items() if "members of group" in part]


async def test_groups_of_which_none_can_be_read_keep_their_members(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        site.fake.faults.broken |= {"/group/", "/spaces/"}
        site.source = site.connect(patient=False)
        cursor: Cursor | None = None
        for _ in range(5):
            parts: list[GroupPage] = []
            with pytest.raises(Retryable):
                await extend(parts, site.source.group_pages(cursor))
            cursor = parts[-1].cursor
        assert site.context.set_aside.reasons() == {}


@pytest.mark.parametrize(
    "cursor", [{}, {"tags": 3, "listings": {}, "read": 0}, {"tags": [], "listings": [], "next": None, "read": 0}]
)
async def test_a_malformed_cursor_of_groups_counts_as_expired(site: Wiki, cursor: Cursor) -> None:
    with pytest.raises(CursorExpired):
        _ = [part async for part in site.source.group_pages(cursor)]


async def test_a_principal_is_the_email_address_or_else_the_account(site: Wiki) -> None:
    site.bob.shows_email = False
    site.source = site.connect(**({} if site.fake.cloud else {"email_domain": None}))
    members = (await site.groups())["space:ENG"].members
    assert members == [f"account:{site.bob.account_id if site.fake.cloud else 'bob'}"]
    key = site.bob.account_id if site.fake.cloud else "bob"
    site.source = site.connect(principals={key: "Bob@Elsewhere.Example"})
    assert (await site.groups())["space:ENG"].members == ["bob@elsewhere.example"]


async def test_a_page_whose_restrictions_are_missing_from_responses_is_readable_by_no_one(site: Wiki) -> None:
    top = site.page("Top")
    page = site.page("Below", parent=top.id)
    site.state.restrict(top.id, users={site.bot.account_id})
    site.fake.faults.lose_restrictions = True
    site.fake.faults.denied = {"byOperation"}
    for entry in (*(await site.full()).values(), *await site.source.fetch([page.id])):
        assert isinstance(entry, Unreadable)
        assert (entry.code, entry.acl_tags) == ("access_unknown", ())
    assert all(listed.acl_tags == () for listed in (await site.slim()).values())


async def test_a_space_whose_permissions_cannot_be_read_has_no_group(site: Wiki) -> None:
    site.fake.faults.denied = {"/permissions"}
    groups = await site.groups()
    assert "space:ENG" not in groups


async def test_a_group_whose_members_cannot_be_read_is_left_out(site: Wiki) -> None:
    site.fake.faults.denied = {"/member"}
    groups = await site.groups()
    assert [tag for tag in groups if tag.startswith("group:")] == []
    assert groups["space:ENG"].members == [name(site.bob)]


async def test_a_revoked_token_raises_misconfigured_and_reports_no_page_gone(site: Wiki) -> None:
    page = site.page("Top")
    site.fake.credentials.clear()
    for asking in (site.source.fetch([page.id]), site.full(), site.slim(), site.groups(), site.source.start()):
        with pytest.raises(Misconfigured, match="token"):
            await asking


async def test_a_page_restricted_away_from_the_connectors_account_is_no_longer_read(site: Wiki) -> None:
    page = site.page("Secret")
    assert set(await site.full()) == {page.id}
    site.state.restrict(page.id, users={site.bob.account_id})
    assert await site.full() == {}
    assert await site.slim() == {}


async def test_access_is_read_again_for_every_page_of_results(site: Wiki) -> None:
    """A restriction set while a crawl is under way holds from the next page on."""
    top = site.page("Top")
    below = [site.page(f"Below {n}", parent=top.id) for n in range(6)]
    pages = site.source.full(None)
    first = await anext(pages)
    assert all(entry.required_tags == () for entry in first.entries)  # type: ignore[union-attr]
    site.state.restrict(top.id, users={site.bot.account_id})
    rest = [entry async for page in pages for entry in page.entries]
    assert {entry.external_id for entry in rest} <= {item.id for item in below}
    assert all(entry.required_tags == (f"restriction:{top.id}",) for entry in rest)  # type: ignore[union-attr]


async def test_restrictions_on_cloud_folders_apply_to_the_pages_below(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        top = site.page("Top")
        folder = site.page("Folder", parent=top.id, kind="folder")
        inner = site.page("Inner folder", parent=folder.id, kind="folder")
        middle = site.page("Middle", parent=inner.id)
        deep = site.page("Deep", parent=middle.id)
        site.state.restrict(folder.id, users={site.bot.account_id, site.ann.account_id})
        for listed in (await site.slim()).values(), (await site.full()).values():
            required = {entry.external_id: entry.required_tags for entry in listed}  # type: ignore[union-attr]
            assert required[deep.id] == required[middle.id] == (f"restriction:{folder.id}",)
            assert required[top.id] == ()
        assert set((await site.groups())[f"restriction:{folder.id}"].members) == {name(site.bot), name(site.ann)}


async def test_a_page_not_yet_in_the_search_index_has_its_parents_restrictions(tmp_path: Path) -> None:
    from datetime import timedelta

    async with wiki("cloud", tmp_path) as site:
        site.fake.index_delay = timedelta(hours=1)
        top = site.page("Top")
        page = site.page("Below", parent=top.id)
        site.state.restrict(top.id, users={site.bot.account_id})
        assert (await site.slim())[page.id].required_tags == (f"restriction:{top.id}",)
        assert f"restriction:{top.id}" in await site.groups()


async def test_anonymous_access_admits_only_the_group_that_the_settings_name(tmp_path: Path) -> None:
    async with wiki("data-center", tmp_path) as site:
        site.state.spaces["ENG"].anonymous = True
        assert (await site.groups())["space:ENG"].of == ["group:staff"]
        site.source = site.connect(anonymous_tag="group:everybody")
        assert (await site.groups())["space:ENG"].of == ["group:everybody", "group:staff"]
        site.fake.faults.anonymous_apart = True
        assert (await site.groups())["space:ENG"].of == ["group:everybody", "group:staff"]
        site.fake.faults.denied.add("permissions/anonymous")
        assert (await site.groups())["space:ENG"].of == ["group:staff"]


async def test_a_role_of_a_space_admits_its_holders_only_if_it_is_known_to_include_viewing(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        space = site.state.add_space("NEW")
        site.state.roles = {"viewer": ("read/space", "read/page"), "exporter": ("export/space",)}
        site.state.groups["readers"] = {site.ann.account_id}
        space.assignments = [
            ("USER", site.bot.account_id, "viewer"),
            ("GROUP", "readers", "viewer"),
            ("GROUP", "staff", "exporter"),
            ("USER", site.bob.account_id, "removed-role"),
        ]
        groups = await site.groups()
        assert groups["space:NEW"].members == [name(site.bot)]
        assert groups["space:NEW"].of == ["group:readers"]
        assert groups["group:readers"].members == [name(site.ann)]
        assert groups["space:ENG"].members == [name(site.bob)]  # by its permissions alone


async def test_a_role_of_all_licensed_users_admits_only_the_group_that_the_settings_name(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        space = site.state.add_space("NEW")
        site.state.roles = {"viewer": ("read/space",)}
        space.assignments = [
            ("ACCESS_CLASS", "all-licensed-users", "viewer"),
            ("ACCESS_CLASS", "all-product-admins", "viewer"),
        ]
        assert (await site.groups())["space:NEW"].of == []
        assert [problem.code for problem in await site.source.check()] == ["licensed"]
        site.source = site.connect(licensed_tag="group:staff")
        assert (await site.groups())["space:NEW"].of == ["group:staff"]
        assert await site.source.check() == []


async def test_all_assignments_of_roles_are_read_over_several_pages_of_results(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        space = site.state.add_space("NEW")
        site.state.roles = {"viewer": ("read/space",)}
        users = [site.state.add_user(f"user{n}") for n in range(300)]
        space.assignments = [("USER", user.account_id, "viewer") for user in (site.bot, *users)]
        assert len((await site.groups())["space:NEW"].members) == 301


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
