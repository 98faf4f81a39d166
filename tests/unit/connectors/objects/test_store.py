"""A store that changes while it is read, or whose server does not keep to its protocol."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from connectors.objects.store import NotReadable, Store
from pipeline.core.errors import Retryable


@pytest.mark.parametrize("become", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_file_that_becomes_something_else_before_it_is_read_is_not_waited_for(
    become: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt took one of the source's four threads for ever, or a descriptor."""
    become(tmp_path / ".penstock.toml")
    monkeypatch.setattr(LocalFileSystem, "isfile", lambda _fs, _path: True)
    with pytest.raises(NotReadable, match="no file"):
        Store(f"file://{tmp_path}", {}).read(".penstock.toml", 100)
    monkeypatch.undo()
    (tmp_path / "rules").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to(tmp_path / "rules")
    assert Store(f"file://{tmp_path}", {}).read("link", 4) == b"0123"
    assert Store(f"file://{tmp_path}", {}).read("none", 4) is None


class Answering:
    """S3 with these keys in one folder."""

    def __init__(self, *keys: str) -> None:
        self._answer = {"Contents": [{"Key": key, "Size": 1, "ETag": "e"} for key in keys]}

    def split_path(self, path: str) -> tuple[str, str, None]:
        return path, "", None

    def call_s3(self, _name: str, **_where: Any) -> dict[str, Any]:
        return self._answer


@pytest.mark.parametrize("key", ["./a.md", "../a.md", "b/./a.md", "b/../a.md", "a.md?versionId=1", "\udcff.md"])
def test_an_object_that_no_path_leads_to_is_not_listed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was requested again with every sweep, because it could be listed and not be read."""
    fs = Answering("a.md", key, ".a", "b/..a")
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda _url, **_: (fs, "bucket"))
    [page] = Store("s3://bucket", {}).pages("")
    assert [stored.path for stored in page.objects] == ["a.md", ".a", "b/..a"]


@pytest.mark.parametrize("tokens", [["again"], ["first", "second", "third"]])
def test_a_server_that_returns_the_same_pages_again_and_again_is_left(
    tokens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = 0

    class Repeating:
        def split_path(self, path: str) -> tuple[str, str, None]:
            return path, "", None

        def call_s3(self, _name: str, **_where: Any) -> dict[str, Any]:
            nonlocal answers
            answers += 1
            assert answers < 5
            return {"IsTruncated": True, "NextContinuationToken": tokens[answers % len(tokens)]}

    monkeypatch.setattr("fsspec.core.url_to_fs", lambda _url, **_: (Repeating(), "bucket"))
    with pytest.raises(Retryable, match="again and again"):
        list(Store("s3://bucket", {}).pages(""))
