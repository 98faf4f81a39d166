"""The files of a folder, and their readers: links, hidden files, ``.penstock.toml``."""

from __future__ import annotations

import inspect
import os
import re
import socket
import sys
from pathlib import Path
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.folder import patterns
from connectors.folder.content import read
from connectors.folder.options import FolderOptions
from connectors.folder.patterns import compiled
from connectors.folder.walk import Candidate, Walk, root_problem
from connectors.protocol import Problem
from pipeline.core.errors import Misconfigured

OPTIONS = FolderOptions(acl_tags=("staff",), required_tags=("nda",))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path.resolve() / "root"
    root.mkdir()
    return root


def put(root: Path, *names: str, content: str = "x") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def walked(
    root: Path, target: Path | None = None, options: FolderOptions = OPTIONS
) -> tuple[Walk, dict[str, Candidate], list[Problem]]:
    walk = Walk(str(root), [str(target or root)], options)
    entries = list(walk.candidates())
    assert walk.complete
    results = {os.path.relpath(entry.path, root): entry for entry in entries if isinstance(entry, Candidate)}
    problems = [entry for entry in entries if isinstance(entry, Problem)]
    assert len(results) + len(problems) == len(entries), "a file was found twice"
    return walk, results, problems


def names(root: Path, target: Path | None = None) -> list[str]:
    return sorted(walked(root, target)[1])


def test_hidden_temporary_and_generated_files_are_skipped(root: Path) -> None:
    put(
        root,
        "a.txt",
        "sub/b.md",
        ".hidden",
        ".git/config",
        "node_modules/x/y.js",
        "__pycache__/a.pyc",
        "a.txt~",
        "sub/.b.md.swp",
        "#a.txt#",
        "~$report.docx",
        "film.mp4.part",
        "sub/c.swp",
    )
    assert names(root) == ["a.txt", "sub/b.md"]


def test_a_hidden_root_is_read(root: Path) -> None:
    put(root / ".docs", "a.txt")
    assert names(root / ".docs") == ["a.txt"]


def test_symlinks_out_of_the_root_are_not_followed(root: Path) -> None:
    put(root.parent, "outside/secret.txt", "root-other/b.txt")
    put(root, "real/a.txt")
    (root / "escape").symlink_to(root.parent / "outside")
    (root / "escape.txt").symlink_to("../outside/secret.txt")
    (root / "sideways").symlink_to(f"{root}-other")
    (root / "same.txt").symlink_to(root / "real/a.txt")
    (root / "same").symlink_to("real")
    (root / "loop").symlink_to(".")
    (root / "real/up").symlink_to("..")
    (root / "self").symlink_to("self")
    _, entries, problems = walked(root)
    assert sorted(entries) == ["real/a.txt"]
    assert sorted((Path(p.path).name, p.code) for p in problems) == [
        ("escape", "link_outside"),
        ("escape.txt", "link_outside"),
        ("self", "broken_link"),
        ("sideways", "link_outside"),
    ]


def test_a_target_behind_a_symlink_is_not_followed(root: Path) -> None:
    put(root.parent, "outside/secret.txt")
    (root / "escape").symlink_to(root.parent / "outside")
    assert names(root, root / "escape/secret.txt") == []


def test_pipes_and_sockets_are_reported_and_not_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(root)  # the address of a socket is short
        server.bind("socket")
        _, entries, problems = walked(root)
    assert (entries, sorted(p.code for p in problems)) == ({}, ["not_a_file", "not_a_file"])


def test_files_whose_names_cannot_be_ids_are_reported(root: Path) -> None:
    (root / os.fsdecode(b"\xff.txt")).write_text("x")
    deep = root
    for _ in range(9):
        deep = deep / ("d" * 240)
    deep.mkdir(parents=True)
    put(deep, "a.txt")
    put(root, "new\nline.txt")
    _, entries, problems = walked(root)
    assert list(entries) == ["new\nline.txt"]
    assert [p.code for p in problems] == ["name", "name"]
    assert all("\n" not in str(p) for p in problems)


def test_a_file_has_the_access_of_the_nearest_policy_file(root: Path) -> None:
    put(root, "a.txt", "hr/b.txt", "hr/pay/c.txt", "open/d.txt")
    put(root, "hr/.penstock.toml", content='acl = ["hr"]\nrequired = []')
    put(root, "hr/pay/.penstock.toml", content='required = ["payroll"]')
    put(root.parent, ".penstock.toml", content='acl = ["beyond the root"]')
    _, entries, problems = walked(root)
    assert {name: (c.acl_tags, c.required_tags) for name, c in entries.items()} == {
        "a.txt": (("staff",), ("nda",)),
        "hr/b.txt": (("hr",), ()),
        "hr/pay/c.txt": (("hr",), ("payroll",)),
        "open/d.txt": (("staff",), ("nda",)),
    }
    assert problems == []


@pytest.mark.parametrize("target", ["hr", "hr/pay", "hr/pay/c.txt"])
def test_walking_a_part_of_a_root_gives_the_same_candidates_as_the_whole(root: Path, target: str) -> None:
    put(root, "hr/b.txt", "hr/pay/c.txt", "hr/pay/d.tmp", "hr/.x/e.txt")
    put(root, ".penstock.toml", content='acl = ["all"]\nexclude = ["*.tmp"]')
    put(root, "hr/.penstock.toml", content='acl = ["hr"]')
    _, whole, _ = walked(root)
    _, part, _ = walked(root, root / target)
    assert part == {name: c for name, c in whole.items() if name == target or name.startswith(f"{target}/")}
    assert part
    assert names(root, root / "hr/.x") == names(root, root / "hr/.x/e.txt") == names(root, root / "hr/pay/d.tmp") == []


def test_a_file_named_as_root_obeys_the_policy_of_its_folder(root: Path) -> None:
    put(root, "hr/b.txt")
    put(root, "hr/.penstock.toml", content='acl = ["hr"]\nexclude = ["b.txt"]')
    _, entries, _ = walked(root / "hr/b.txt")
    assert [c.acl_tags for c in entries.values()] == [("hr",)]
    put(root, "hr/.penstock.toml", content="acl = 1")
    walk, entries, problems = walked(root / "hr/b.txt")
    assert (entries, walk.broken, [p.code for p in problems]) == ({}, [str(root / "hr/b.txt")], ["policy"])


@pytest.mark.parametrize(
    "content",
    [
        "acl = [",
        'acl = "hr"',
        "acl = [1]",
        'acl = [""]',
        'alc = ["hr"]',
        'source = "x"',
        'exclude = "*.tmp"',
        "exclude = [1]",
        'include = [""]',
        "acl = " + str(["t" * 501]),
        'acl = ["a\\u0000"]',
        "\xff",
        'include = ["[z-a]"]',
    ],
)
def test_files_below_an_invalid_policy_file_are_not_published(root: Path, content: str) -> None:
    put(root, "a.txt", "hr/b.txt", "hr/deep/c.txt")
    (root / "hr/.penstock.toml").write_bytes(content.encode("latin-1"))
    walk, entries, problems = walked(root)
    assert sorted(entries) == ["a.txt"]
    assert (walk.broken, [p.code for p in problems]) == ([str(root / "hr")], ["policy"])
    assert "\n" not in str(problems[0])
    assert names(root, root / "hr/deep/c.txt") == []


def test_files_below_an_unreadable_policy_file_are_not_published(root: Path) -> None:
    put(root, "link/a.txt", "folder/b.txt", "pipe/c.txt")
    put(root.parent, "open.toml", content='acl = ["everyone"]')
    (root / "link/.penstock.toml").symlink_to(root.parent / "open.toml")
    (root / "folder/.penstock.toml").mkdir()
    os.mkfifo(root / "pipe/.penstock.toml")
    _, entries, problems = walked(root)
    assert ([p.code for p in problems], entries) == (["policy"] * 3, {})


def test_files_without_readers_are_reported_once_for_each_policy(root: Path) -> None:
    put(root, "a.txt", "none/b.txt", "none/c.txt")
    put(root, "none/.penstock.toml", content="acl = []")
    _, entries, problems = walked(root)
    assert entries["none/b.txt"].acl_tags == ()
    assert [(p.code, p.path) for p in problems] == [("nobody", str(root / "none/.penstock.toml"))]
    _, _, problems = walked(root, options=FolderOptions(acl_tags=()))
    assert sorted(p.code for p in problems) == ["nobody", "nobody"]


def test_include_and_exclude_patterns_of_nested_policies_are_combined(root: Path) -> None:
    put(root, "a.md", "b.txt", "drafts/c.md", "sub/drafts/d.md", "sub/e.md", "sub/f.tmp.md", "sub/g.txt")
    put(root, ".penstock.toml", content='include = ["*.md"]\nexclude = ["/drafts/"]')
    put(root, "sub/.penstock.toml", content='exclude = ["*.tmp.*"]')
    assert names(root) == ["a.md", "sub/drafts/d.md", "sub/e.md"]
    put(root, "sub/.penstock.toml", content='include = ["*.txt"]')
    assert names(root) == ["a.md", "sub/g.txt"]


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.md", ["a.md", "x/y/a.md"], ["a.mdx", "a.md5/b"]),
        ("/a.md", ["a.md"], ["x/a.md"]),
        ("drafts", ["drafts", "drafts/x", "x/drafts/y"], ["draft", "drafts2"]),
        ("a/*/c", ["a/b/c", "a/b/c/d"], ["a/c", "a/b/b/c"]),
        ("a/**/c", ["a/c", "a/b/c", "a/b/b/c"], ["ac", "b/a/c"]),
        ("**/c", ["c", "a/b/c"], ["cc"]),
        ("a/**", ["a/b", "a/b/c"], ["b/a"]),
        ("[!ab]?.txt", ["cx.txt", "x/cy.txt"], ["ax.txt", "c.txt"]),
        ("a.b+(c)", ["a.b+(c)"], ["aXb+(c)"]),
    ],
)
def test_include_and_exclude_patterns_match_the_expected_paths(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [path for path in yes if not compiled(pattern).fullmatch(path)] == []
    assert [path for path in no if compiled(pattern).fullmatch(path)] == []


@given(st.text("ab*/?[!]", min_size=1, max_size=9), st.text("ab/!\n", max_size=8))
def test_patterns_with_many_wildcards_match_what_a_regular_expression_matches(pattern: str, path: str) -> None:
    """The number of wildcards alone decides which of the two is used."""
    results = []
    for fast in (0, 1_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patterns, "MAX_FAST_WILDCARDS", fast)
            try:
                results.append(bool(patterns.compiled.__wrapped__(pattern).fullmatch(path)))
            except re.error:
                results.append(False)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a" * 400 + "*b", "a" * 255),
        ("**/a/" * 190 + "**/b", "a/" * 1_000),
        ("**[ab]*" * 140, "a/" * 1_000),
        ("**a**b", "a" * 2_000),
    ],
)
def test_a_name_that_nearly_matches_many_wildcards_is_matched_quickly(pattern: str, path: str) -> None:
    """A person who can write into a folder can write both: a regular expression would keep every connector of the
    process busy for years."""
    before = process_time()
    compiled(pattern).fullmatch(path)
    assert process_time() - before < 1


@pytest.mark.parametrize(
    "content",
    [
        "acl = " + "9" * 5_000,
        f"exclude = {['x'] * 1_001}",
        f'exclude = ["{"x" * 1_001}"]',
        'exclude = ["[z-a]"]',
        f"include = {['x' * 1_000] * 51}",
        f"{'.'.join('a' * 500_000)} = 1",
        f"""acl = ["x"]  # 'a'\nexclude = [\"\"\"x\"\"\"\", {{{".".join(["'''b'''"] * 90_000)} = 1}}]""",
    ],
    ids=["number", "patterns", "long-pattern", "range", "many-characters", "long-key", "long-key-behind-quotes"],
)
def test_a_policy_made_to_fail_affects_only_its_own_folder(root: Path, content: str) -> None:
    put(root, "a.txt", "mine/b.txt")
    put(root, "mine/.penstock.toml", content=content)
    walk, entries, problems = walked(root)
    assert list(entries) == ["a.txt"]
    assert [problem.code for problem in problems] == ["policy"]
    assert walk.broken == [str(root / "mine")]


def test_patterns_of_folders_in_folders_count_together(root: Path) -> None:
    """A file is compared with all of them."""
    many = f"exclude = {['x' * 1_000] * 30}"
    put(root, "a.txt", "mine/b.txt", "mine/deeper/c.txt")
    put(root, "mine/.penstock.toml", "mine/deeper/.penstock.toml", content=many)
    walk, entries, _ = walked(root)
    assert list(entries) == ["a.txt", "mine/b.txt"]
    assert walk.broken == [str(root / "mine/deeper")]


def test_dots_in_texts_of_a_policy_are_no_parts_of_keys(root: Path) -> None:
    dots = ".".join("a" * 200)
    rules = f'acl = ["x"] # {dots}\nexclude = ["{dots}", \'{dots}\', """\n{dots}\\"\n""""]\n'
    put(root, "a.txt")
    put(root, ".penstock.toml", content=rules)
    _, entries, problems = walked(root)
    assert (list(entries), problems) == (["a.txt"], [])


def test_a_file_within_very_many_folders_is_read_under_the_current_rules(root: Path) -> None:
    """A name has room for a thousand, and Python's stack has not."""
    put(root, f"{'a/' * 150}b.txt")
    walk = Walk(str(root), [str(root)], OPTIONS)
    batch = [entry for entry in walk.candidates() if isinstance(entry, Candidate)]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        assert walk.access_now(batch) == batch
    finally:
        sys.setrecursionlimit(limit)


def test_a_folder_that_becomes_a_link_for_a_moment_is_not_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who may write there exchanges it just before a file is opened, and back just after."""
    put(root, "sub/a.txt", content="public")
    put(root.parent, "secrets/a.txt", content="secret")
    real = os.open

    def exchanging(path: str, flags: int, *rest: int, **more: int) -> int:
        (root / "sub").rename(root / "aside")
        (root / "sub").symlink_to(root.parent / "secrets")
        try:
            return real(path, flags, *rest, **more)
        finally:
            (root / "sub").unlink()
            (root / "aside").rename(root / "sub")

    listed = os.lstat(root / "sub/a.txt")
    monkeypatch.setattr(os, "open", exchanging)
    file = read(str(root / "sub/a.txt"), listed)
    monkeypatch.undo()
    assert (file.extracted, file.unreadable and file.unreadable.code) == (None, "not_a_file")


def test_a_file_that_vanishes_during_the_listing_is_no_problem(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "a.txt", "b.txt", "sub/c.txt")
    real = os.lstat

    def lstat(path: str) -> os.stat_result:
        if path.endswith("a.txt"):
            raise FileNotFoundError(2, "gone")
        return real(path)

    monkeypatch.setattr("connectors.folder.walk.os.lstat", lstat)
    walk, entries, problems = walked(root)
    assert (sorted(entries), problems, walk.unreadable) == (["b.txt", "sub/c.txt"], [], [])


def test_a_missing_root_is_reported(root: Path) -> None:
    assert root_problem(str(root)) is None
    missing = root_problem(str(root / "no\nsuch"))
    assert missing is not None
    assert missing.code == "missing"
    assert "\n" not in str(missing)


@pytest.mark.parametrize(
    "wrong",
    [{"tenant": "a/b"}, {"source": ""}, {"acl_tags": ("",)}, {"acl_tags": "staff"}, {"scan_interval_seconds": 0}],
)
def test_invalid_options_are_misconfigured(wrong: dict[str, object]) -> None:
    with pytest.raises(Misconfigured):
        FolderOptions(**{"acl_tags": ("staff",), **wrong})  # type: ignore[arg-type]  # wrong on purpose
