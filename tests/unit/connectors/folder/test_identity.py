"""The document ids of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.folder.identity import Identities


@pytest.fixture
def ids(tmp_path: Path) -> Iterator[Identities]:
    made = Identities(tmp_path / "files.sqlite")
    yield made
    made.close()


def written(path: Path, text: str, mtime_ns: int) -> Path:
    path.write_text(text)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def of(ids: Identities, path: Path) -> str:
    return ids.of(str(path), path.stat())


def test_a_moved_file_retains_its_id_and_a_new_file_at_its_old_path_gets_another(
    ids: Identities, tmp_path: Path
) -> None:
    first = written(tmp_path / "a.md", "text", 1)
    assert of(ids, first) == str(first)
    moved = first.rename(tmp_path / "b.md")
    assert of(ids, moved) == str(first)
    assert ids.path_of(str(first)) == str(moved)
    other = written(tmp_path / "a.md", "another", 2)
    assert of(ids, other) == f"{other}#"
    assert ids.path_of(f"{other}#") == str(other)
    assert (ids.id_at(str(moved)), ids.id_at(str(tmp_path / "c"))) == (str(first), None)


def test_a_file_replaced_at_the_same_path_retains_its_id(ids: Identities, tmp_path: Path) -> None:
    path = written(tmp_path / "a.md", "text", 1)
    of(ids, path)
    written(tmp_path / "fresh", "edited", 2).replace(path)
    assert of(ids, path) == str(path)
    assert of(ids, path.rename(tmp_path / "b.md")) == str(path), "its looks are known by now"


def test_a_new_file_that_reuses_a_deleted_files_inode_gets_a_new_id(ids: Identities, tmp_path: Path) -> None:
    old = written(tmp_path / "a.md", "text", 1)
    of(ids, old)
    inode = old.stat().st_ino
    new = old.rename(tmp_path / "b.md")  # the same inode; and then, as after a reuse, other looks
    written(new, "something else", 2)
    assert new.stat().st_ino == inode
    assert of(ids, new) == str(new)


def test_a_hard_link_gets_its_own_id(ids: Identities, tmp_path: Path) -> None:
    path = written(tmp_path / "a.md", "text", 1)
    of(ids, path)
    os.link(path, tmp_path / "b.md")
    assert of(ids, tmp_path / "b.md") == str(tmp_path / "b.md")
