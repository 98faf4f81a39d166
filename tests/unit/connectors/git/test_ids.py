"""External ids that follow renames, and what git's options refuse."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from connectors.git.history import Change, Ids, advance_ids, default_id, rebuild_ids
from connectors.git.options import GitOptions

NAMES = ["a", "b", "c", "d", "e@1", "b\udcff"]


def after(ids: Ids, commit: str, live: set[str], *changes: Change) -> Ids:
    return advance_ids(ids, changes, commit, live)


def test_a_renamed_file_keeps_its_id_and_a_new_file_of_the_old_name_gets_another() -> None:
    ids = after(Ids(), "1" * 40, {"a"}, Change("added", "a"))
    assert ids.id_of("a") == "a"
    ids = after(ids, "2" * 40, {"b"}, Change("renamed", "b", "a"))
    ids = after(ids, "3" * 40, {"b", "a"}, Change("added", "a"))
    assert (ids.id_of("b"), ids.id_of("a")) == ("a", "a@333333333333")
    ids = after(ids, "4" * 40, {"b", "a"}, Change("renamed", "b", "a"), Change("renamed", "a", "b"))
    assert (ids.id_of("a"), ids.id_of("b")) == ("a", "a@333333333333")


def test_a_renamed_file_that_is_deleted_and_restored_has_its_first_id() -> None:
    ids = after(Ids(), "1", {"b"}, Change("renamed", "b", "a"))
    ids = after(ids, "2", set(), Change("deleted", "b"))
    assert ids.last_id_of("b") == "a"
    assert after(ids, "3", {"b"}, Change("added", "b")).id_of("b") == "a"
    ids = after(ids, "3", {"a"}, Change("added", "a"))
    ids = after(ids, "4", {"a", "b"}, Change("added", "b"))
    assert (ids.id_of("a"), ids.id_of("b")) == ("a", "b")


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(["add", "delete", "move", "lose"]), st.sampled_from(NAMES), st.sampled_from(NAMES)
            ),
            max_size=4,
        ),
        max_size=12,
    )
)
def test_ids_are_unique_in_every_tree_and_survive_a_restart(steps: list[list[tuple[str, str, str]]]) -> None:
    ids, live = Ids(), set()
    for number, step in enumerate(steps):
        before, changes, touched = set(live), [], set()
        for what, path, other in step:
            if {path, other} & touched:
                continue
            if what == "add" and path not in live:
                changes.append(Change("added", path))
                live.add(path)
            elif what == "delete" and path in live:
                changes.append(Change("deleted", path))
                live.discard(path)
            elif what == "move" and path in before and path in live and other not in live:
                changes.append(Change("renamed", other, path))
                live = (live - {path}) | {other}
            touched |= {path, other}
        known = {path: ids.id_of(path) for path in before & live}
        commit = f"{number:040x}"[::-1]
        if any(what == "lose" for what, *_ in step):
            ids = rebuild_ids(ids, commit, live)
        else:
            ids = advance_ids(ids, changes, commit, live)
            assert all(ids.id_of(path) == name for path, name in known.items())
        assert len({ids.id_of(path) for path in live}) == len(live)
        ids = Ids.from_json(json.loads(json.dumps(ids.to_json()).encode("utf-8").decode("utf-8")))
        assert len({ids.id_of(path) for path in live}) == len(live)


def test_a_path_that_is_no_utf8_or_too_long_gets_a_valid_unique_id() -> None:
    ids = {
        default_id(name)
        for name in ("x/\udcff", "x/\udcfe", "x/\\xff", "d/" * 2000, "d/" * 2001, "ü" * 1000, "ü" * 1001)
    }
    assert len(ids) == 7
    assert all(0 < len(name.encode("utf-8")) <= 2000 for name in ids)
    kept = Ids("1", {"\x01\udcff01": "x"}, {"\udc80": "y"})
    assert "\\ud" not in json.dumps(kept.to_json())
    assert Ids.from_json(kept.to_json()) == kept


@pytest.mark.parametrize(
    "url",
    [
        "https://git.example.com/team/wiki.git",
        "https://git.example.com:8443/wiki",
        "ssh://git@example.com:22/wiki.git",
        "git@example.com:team/wiki.git",
        "file:///srv/git/wiki.git",
        "https://[2001:db8::1]/x",
    ],
)
def test_a_valid_repository_url_is_accepted(url: str) -> None:
    assert GitOptions(url=url).url == url


@pytest.mark.parametrize(
    "url",
    [
        "ext::sh -c touch% /tmp/pwned",
        "ext::https://x/",
        "git://example.com/x",
        "http://example.com/x",
        "/srv/wiki",
        "https://user:secret-canary@example.com/x",
        "https://token@example.com/x",
        "--upload-pack=x",
        "-oProxy:x",
        "ssh://-oProxyCommand=x/y",
        "git@-oProxyCommand=x:y",
        "fd::17",
        "file://host/x",
        "https://h/x\ny",
        "some::x",
        "example.com:team/wiki",
        "a@b::c",
        "",
    ],
)
def test_an_unsafe_or_invalid_repository_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        GitOptions(url=url)


@pytest.mark.parametrize("branch", ["", "-x", "a..b", "a b", "a:b", "+a", "@{-1}", "a\nb", "/a", "a/", "x^", "x*"])
def test_an_invalid_branch_name_is_refused(branch: str) -> None:
    if branch == "+a":  # git allows it; in a refspec it stands behind refs/heads/
        assert GitOptions(url="file:///x", branch=branch).branch == branch
        return
    with pytest.raises(ValidationError):
        GitOptions(url="file:///x", branch=branch)


@pytest.mark.parametrize(
    "wrong",
    [
        {"source_url": "https://x/{commit}"},
        {"source_url": "https://x/{path.__class__}"},
        {"source_url": "https://x/"},
        {"source_url": "javascript:{path}"},
        {"token": "t"},
        {"acl_tags": ["a"], "access_file": "/x"},
        {"unknown": 1},
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GitOptions(url="file:///x", **wrong)


def test_the_last_rule_that_matches_a_file_decides_its_access() -> None:
    options = GitOptions(
        url="file:///x",
        acl_tags=["all"],
        required_tags=["staff"],
        include=["docs/**", "*.py"],
        exclude=["draft*"],
        rules=[
            {"paths": ["docs/"], "acl_tags": ["docs"]},
            {"paths": ["docs/hr/"], "acl_tags": [], "required_tags": ["hr"]},
        ],
    )
    access = options.access()
    assert access.tags_of("x.py") == (["all"], ["staff"])
    assert access.tags_of("docs/a.md") == (["docs"], [])
    assert access.tags_of("docs/hr/a.md") == ([], ["hr"])
    assert access.tags() == {"all", "staff", "docs", "hr"}
    taken = [path for path in ("docs/a.png", "x.py", "a/x.py", "x.txt", "docs/draft.md") if options.selects(path)]
    assert taken == ["docs/a.png", "x.py", "a/x.py"]
