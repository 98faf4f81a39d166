"""The fake's state: what its index finds is what a look at every item finds, whatever its users did."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.fakes.confluence_cql import Index, search
from connectors.fakes.confluence_state import Item, State

AT = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
SPACES = ("ENG", "OPS")
ACTIONS = ("page", "blogpost", "comment", "attachment", "edit", "move", "trash", "restore", "purge")
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99), st.integers(0, 99)), max_size=30)


def make_state() -> State:
    state = State()
    state.freeze(AT)
    state.add_user("ann")
    for key in SPACES:
        state.add_space(key)
    return state


def act(state: State, action: str, which: int, where: int) -> None:
    pages = [item for item in state.items.values() if item.kind == "page"]
    items = [*state.items.values()]
    page = pages[which % len(pages)] if pages else None
    match action:
        case "page":
            parent = pages[where % len(pages)] if pages and where % 2 else None
            state.add_page(parent.space if parent else SPACES[which % 2], "x", parent=parent.id if parent else None)
        case "blogpost":
            state.add_page(SPACES[which % 2], "x", kind="blogpost")
        case "comment" if page:
            comments = [part for part in state.parts(page.id) if part.kind == "comment"]
            state.add_comment(page.id, "x", parent=comments[0].id if comments and where % 2 else None)
        case "attachment" if page:
            state.attach(page.id, "x", b"", "text/plain")
        case "edit" if items:
            state.edit(items[which % len(items)].id, body="y")
        case "move" if page:
            targets = [target for target in pages if page not in state.chain(target)]
            target = targets[where % len(targets)] if targets and where % 3 else None
            state.move(page.id, target.id if target else None, space=target.space if target else SPACES[where % 2])
        case "trash" if page:
            state.trash(page.id)
        case "restore" if page:
            state.restore(page.id)
        case "purge" if page and not state.below(page.id):
            state.purge(page.id)
    state.advance(minutes=1)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_the_index_finds_what_a_look_at_every_item_finds(steps: list[tuple[str, int, int]]) -> None:
    state = make_state()
    for step in steps:
        act(state, *step)
    items = [*state.items.values()]
    for key in SPACES:
        for kind in ("page", "attachment"):
            for after in (0, items[len(items) // 2].number if items else 0):
                expected = [i for i in items if i.space == key and i.kind == kind and i.number > after]
                assert list(state.listed([kind], [key], after)) == expected
    for item in items:
        assert sorted(part.id for part in state.parts(item.id)) == sorted(i.id for i in items if i.container == item.id)
        below = [i for i in items if item in state.chain(i)[:-1] and not i.container]
        if item.kind == "page":
            assert sorted(page.id for page in state.below(item.id)) == sorted(page.id for page in below)
    for minutes in (0, 3, 30):
        at = AT + timedelta(minutes=minutes)
        assert state.written_since(at) == [i for i in items if any(version >= at for version in i.versions)]


@settings(max_examples=100, deadline=None)
@given(steps, st.integers(0, 10))
def test_a_search_by_index_finds_what_a_search_of_everything_finds(steps: list[tuple[str, int, int]], n: int) -> None:
    state = make_state()
    for step in steps:
        act(state, *step)
    ids = [item.id for item in state.items.values()] or ["1"]
    chosen, other = ids[n % len(ids)], ids[-1]
    index = Index(state, timedelta(minutes=2), ZoneInfo("UTC"))
    for cql in (
        f'id in ("{chosen}", "{other}")',
        f'container in ("{chosen}", "{other}") and type = comment',
        f'ancestor = "{chosen}" and type = page',
        f'lastmodified >= now("-{n}m") and type in (page, attachment) and space = ENG',
        f'lastmodified = now("-{n}m")',
        "type = page and space in (ENG, OPS)",
    ):
        # A double negation cannot be looked up: every item is tested.
        assert search(cql, index) == search(f"not (not ({cql}))", index), cql


def test_a_moved_tree_is_listed_in_its_new_space() -> None:
    state = make_state()
    top = state.add_page("ENG", "Top")
    below = state.add_page("ENG", "Below", parent=top.id)
    file = state.attach(below.id, "a", b"", "text/plain")

    def listed(space: str) -> list[Item]:
        return list(state.listed(["page", "attachment"], [space]))

    assert (listed("ENG"), listed("OPS")) == ([top, below, file], [])
    state.move(top.id, None, space="OPS")
    assert (listed("ENG"), listed("OPS")) == ([], [top, below, file])
    state.purge(below.id)
    assert listed("OPS") == [top]
