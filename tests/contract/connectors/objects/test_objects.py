"""The source of object stores: on stores in memory and of files, and (slow) on a server of S3 and one of SFTP."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from connectors.declared import options
from connectors.fakes.s3 import BUCKET, KEY, SECRET, FakeS3
from connectors.folder.access import Policy
from connectors.objects import sftp
from connectors.objects import source as objects_source
from connectors.objects import store as objects_store
from connectors.objects.source import Objects
from connectors.objects.store import Store, StoredObject
from connectors.set_aside import MAX_FAILURES
from connectors.source import Context, Document, Gone, Listed, Unlisted, Unreadable
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.runtime.http_server import served
from tests.support.connectors.hostile_pdfs import damaged_pdf
from tests.support.connectors.pdf_files import pdf_of
from tests.support.connectors.reading import one
from tests.support.connectors.sftp_server import PASSWORD, SftpServer, sftp_server

KINDS = ("memory", "file", pytest.param("s3", marks=pytest.mark.slow), pytest.param("sftp", marks=pytest.mark.slow))


@dataclass
class Desk:
    """A store, and sources that read it."""

    url: str
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    server: Any = None
    opened: list[Objects] = field(default_factory=list)

    def source(self, **more: Any) -> Objects:
        declared = {"url": self.url, "acl_tags": ["team"], "settings": dict(self.settings), **more}
        environment = {f"PENSTOCK_S_{name.upper()}": value for name, value in self.secrets.items()}
        given = options(Objects, declared, "s", environment)
        source = Objects(given, Context(name="s", tenant="t", memory=None, folder=self.folder))  # type: ignore[arg-type]
        self.opened.append(source)
        return source

    def put(self, path: str, content: str | bytes = "Some text.") -> None:
        if isinstance(self.server, SftpServer):
            file = self.server.folder / "docs" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
            return
        fs, root = self._file_system()
        fs.makedirs(f"{root}/{path}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{root}/{path}", content.encode() if isinstance(content, str) else content)

    def remove(self, path: str) -> None:
        if isinstance(self.server, SftpServer):
            (self.server.folder / "docs" / path).unlink()
            return
        fs, root = self._file_system()
        fs.rm_file(f"{root}/{path}")

    def _file_system(self) -> tuple[Any, str]:
        return fsspec.core.url_to_fs(self.url, skip_instance_cache=True, **self.settings, **self.secrets)


@contextmanager
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture(params=KINDS)
async def desk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Desk]:
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    with ExitStack() as closing:
        match request.param:
            case "memory":
                desk = Desk(f"memory://{uuid.uuid4().hex}/docs", downloads)
            case "file":
                desk = Desk(f"file://{tmp_path}/docs", downloads)
            case "s3":
                address = closing.enter_context(s3_server())
                bucket = f"b{uuid.uuid4().hex}"
                keys = {"key": "an id", "secret": "a secret"}
                desk = Desk(f"s3://{bucket}/docs", downloads, {"endpoint_url": address}, keys)
                fsspec.filesystem("s3", skip_instance_cache=True, endpoint_url=address, **keys).mkdir(bucket)
            case _:
                (tmp_path / "served" / "docs").mkdir(parents=True)
                server = closing.enter_context(sftp_server(tmp_path / "served"))
                known = str(server.write_known_hosts(tmp_path / "known_hosts"))
                secrets = {"password": PASSWORD}
                desk = Desk(f"{server.url}/docs", downloads, {"known_hosts": known}, secrets, server)
        yield desk
        for source in desk.opened:
            await source.close()


async def listing(source: Objects) -> dict[str, Listed]:
    entries = [entry async for page in source.list() for entry in page]
    assert all(isinstance(entry, Listed) for entry in entries)
    return {entry.external_id: entry for entry in entries if isinstance(entry, Listed)}


async def test_every_object_is_listed_as_it_is_read(desk: Desk) -> None:
    names = ("readme.md", "a/b/c/deep.txt", "a/über 50% #1.md", "a/page.html", "report.pdf")
    for name in names:
        desk.put(name, pdf_of(["The otter sleeps."]) if name.endswith("pdf") else f"About {name}.")
    for hidden in (".git/config", "a/~$lock.docx", "node_modules/x/index.js", "a/logo.png"):
        desk.put(hidden)
    desk.put("a/empty.md", "")
    source = desk.source(source_url="https://files.example/{path}", members={"team": ["ada@example.com"]})
    listed = await listing(source)
    assert sorted(listed) == sorted(names)
    for name, entry in listed.items():
        document = await one(source, name)
        assert isinstance(document, Document)
        assert (document.revision, document.acl_tags, document.required_tags) == (
            entry.revision,
            entry.acl_tags,
            entry.required_tags,
        )
        assert document.metadata["path"] == name
        assert ("otter" if name.endswith("pdf") else f"About {name}.") in document.content
    encoded = await one(source, "a/über 50% #1.md")
    assert isinstance(encoded, Document)
    assert encoded.source_url == "https://files.example/a/%C3%BCber%2050%25%20%231.md"
    assert await source.check() == []
    assert list(desk.folder.iterdir()) == [], "no download is left"


async def test_an_edit_changes_the_revision_and_a_removed_object_is_gone(desk: Desk) -> None:
    desk.put("a.md", "One.")
    desk.put("b.md", "One.")
    source = desk.source()
    before = await listing(source)
    assert await listing(source) == before
    desk.put("a.md", "Two, longer.")
    after = await listing(source)
    assert after["a.md"].revision != before["a.md"].revision
    assert after["b.md"] == before["b.md"]
    desk.remove("b.md")
    assert list(await listing(source)) == ["a.md"]
    assert await one(source, "b.md") == Gone("b.md")
    assert await one(source, "never.md") == Gone("never.md")


async def test_sidecar_files_say_who_may_read_their_folder(desk: Desk) -> None:
    desk.put("open.md")
    desk.put("board/minutes.md")
    desk.put("board/2026/q1.md")
    desk.put("board/2026/draft.md")
    desk.put("board/.penstock.toml", 'acl = ["board"]\nrequired = ["nda"]\nexclude = ["draft.md"]\n')
    source = desk.source(sidecars=True)
    listed = await listing(source)
    access = {name: (tuple(entry.acl_tags), tuple(entry.required_tags)) for name, entry in listed.items()}
    assert access == {
        "open.md": (("team",), ()),
        "board/minutes.md": (("board",), ("nda",)),
        "board/2026/q1.md": (("board",), ("nda",)),
    }
    assert await one(source, "board/2026/draft.md") == Gone("board/2026/draft.md")
    document = await one(source, "board/2026/q1.md")
    assert isinstance(document, Document)
    assert (document.acl_tags, document.required_tags) == (("board",), ("nda",))

    ignoring = await listing(desk.source())
    assert {tuple(entry.acl_tags) for entry in ignoring.values()} == {("team",)}
    desk.put(".penstock.toml", "acl = [")
    with pytest.raises(Misconfigured, match=r"^\.penstock\.toml is not valid TOML.*: nothing is read until"):
        await listing(source)
    with pytest.raises(Misconfigured, match="nothing is read until"):
        await one(source, "board/2026/q1.md")


async def assert_only_the_board_is_unlisted(source: Objects, reason: str) -> None:
    entries = [entry async for page in source.list() for entry in page]
    assert [entry.external_id for entry in entries if isinstance(entry, Listed)] == ["open.md"]
    unlisted = {entry for entry in entries if isinstance(entry, Unlisted)}
    assert {(entry.part, entry.id_prefix) for entry in unlisted} == {("folder board", "board/")}
    assert all(reason in entry.reason for entry in unlisted)
    assert isinstance(await one(source, "open.md"), Document)
    document = await one(source, "board/2026/q1.md")
    assert isinstance(document, Unreadable)
    assert (document.code, document.acl_tags) == ("bad_rules", ())


async def test_a_sidecar_file_that_is_invalid_concerns_its_folder_alone(desk: Desk) -> None:
    """One such file stopped the reading of all folders, and so every revocation in them."""
    for name in ("open.md", "board/minutes.md", "board/2026/q1.md"):
        desk.put(name)
    source = desk.source(sidecars=True)
    desk.put("board/.penstock.toml", "acl = [")
    await assert_only_the_board_is_unlisted(source, "board/.penstock.toml is not valid TOML")
    desk.put("board/.penstock.toml", " " * (1024 * 1024 + 1))
    await assert_only_the_board_is_unlisted(source, "board/.penstock.toml is longer than 1048576 bytes")
    desk.put("board/.penstock.toml", 'acl = ["board"]')
    assert set(await listing(source)) == {"open.md", "board/minutes.md", "board/2026/q1.md"}


async def test_patterns_and_sizes_select_objects(desk: Desk) -> None:
    for name in ("docs/a.md", "docs/old/b.md", "c.md", "docs/d.csv", "docs/damaged.pdf"):
        desk.put(name, damaged_pdf() if name.endswith("pdf") else "Some text.")
    desk.put("docs/large.md", "x" * 2_000)
    source = desk.source(include=["docs/**"], exclude=["old", "*.csv"], max_file_bytes=1_500)
    assert sorted(await listing(source)) == ["docs/a.md", "docs/damaged.pdf", "docs/large.md"]
    assert await one(source, "c.md") == Gone("c.md")
    large = await one(source, "docs/large.md")
    assert isinstance(large, Unreadable)
    assert (large.code, large.message) == (
        "too_large",
        "large.md is larger than 1,500 bytes: raise max_file_bytes, or divide the file",
    )
    damaged = await one(source, "docs/damaged.pdf")
    assert isinstance(damaged, Unreadable)
    assert list(desk.folder.iterdir()) == []


async def test_an_address_that_holds_nothing_deletes_nothing(desk: Desk) -> None:
    desk.put("a.md")
    wrong = desk.source(url=f"{desk.url}-of-another-year")
    with pytest.raises(Retryable, match="check bucket and prefix"):
        await listing(wrong)


@pytest.mark.parametrize("name", ["../secret.md", "a/../../secret.md", "/etc/passwd", "", ".penstock.toml", "a//b.md"])
async def test_an_external_id_cannot_leave_the_address(desk: Desk, name: str) -> None:
    desk.put("a.md")
    assert await one(desk.source(), name) == Gone(name)


LINKING = ("file", pytest.param("sftp", marks=pytest.mark.slow))


def _folder_of(desk: Desk) -> Path:
    return desk.server.folder / "docs" if desk.server else Path(desk.url.removeprefix("file://"))


@pytest.mark.parametrize("desk", LINKING, indirect=True)
async def test_a_sidecar_file_that_is_a_symbolic_link_restricts_what_is_listed_and_read(desk: Desk) -> None:
    desk.put("rules.md")
    desk.put("board/minutes.md")
    desk.put("board.toml", 'acl = ["board"]\n')
    (_folder_of(desk) / "board" / ".penstock.toml").symlink_to("../board.toml")
    source = desk.source(sidecars=True)
    listed = await listing(source)
    document = await one(source, "board/minutes.md")
    assert isinstance(document, Document)
    assert tuple(listed["board/minutes.md"].acl_tags) == tuple(document.acl_tags) == ("board",)
    desk.put("open.md")
    desk.remove("rules.md")
    desk.put("board/2026/q1.md")
    (_folder_of(desk) / "board.toml").unlink()
    await assert_only_the_board_is_unlisted(source, "board/.penstock.toml is a symbolic link to no file")


@pytest.mark.parametrize("desk", LINKING, indirect=True)
async def test_a_sidecar_file_that_no_one_can_read_concerns_its_folder_alone(desk: Desk) -> None:
    for name in ("open.md", "board/minutes.md", "board/2026/q1.md"):
        desk.put(name)
    desk.put("board/.penstock.toml", 'acl = ["board"]')
    if desk.server:
        desk.server.denied.add(".penstock.toml")
        source = desk.source(sidecars=True)
        await assert_only_the_board_is_unlisted(source, "board/.penstock.toml cannot be read")
    sidecar = _folder_of(desk) / "board" / ".penstock.toml"
    for is_pipe in (True, False):  # neither is a file: a pipe was waited for without end
        sidecar.unlink()
        os.mkfifo(sidecar) if is_pipe else sidecar.mkdir()
        source = desk.source(sidecars=True)
        async with asyncio.timeout(20):
            listed = await listing(source)
            document = await one(source, "board/minutes.md")
        assert set(listed) == {"open.md", "board/minutes.md", "board/2026/q1.md"}
        assert isinstance(document, Document)
        assert tuple(document.acl_tags) == tuple(listed["board/minutes.md"].acl_tags) == ("team",)


@pytest.mark.parametrize("desk", LINKING, indirect=True)
async def test_a_name_that_is_not_utf_8_is_left_out_and_no_other(desk: Desk) -> None:
    desk.put("a/b.md")
    (_folder_of(desk) / "a" / os.fsdecode(b"caf\xe9.md")).write_text("A text.")
    (_folder_of(desk) / os.fsdecode(b"caf\xe9")).mkdir()
    source = desk.source()
    assert list(await listing(source)) == ["a/b.md"]
    assert await one(source, os.fsdecode(b"a/caf\xe9.md")) == Gone(os.fsdecode(b"a/caf\xe9.md"))


@pytest.mark.parametrize("desk", ["file"], indirect=True)
@pytest.mark.parametrize("replaced", ["a/b/c.md", "a/b"])
async def test_what_becomes_a_link_before_it_is_read_is_left_out(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    """A writer of the folder had any file published that the connector may read."""
    desk.put("a/b/c.md", "A text.")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "c.md").write_text("A secret.")
    original = Store.find

    def find(store: Store, path: str) -> StoredObject | None:
        stored = original(store, path)
        place = _folder_of(desk) / replaced
        place.rename(tmp_path / "moved")
        place.symlink_to(outside / "c.md" if replaced.endswith(".md") else outside)
        return stored

    source = desk.source()
    assert isinstance(await one(source, "a/b/c.md"), Document)
    monkeypatch.setattr(Store, "find", find)
    assert await one(source, "a/b/c.md") == Gone("a/b/c.md")


@pytest.mark.parametrize("desk", ["file"], indirect=True)
async def test_a_file_whose_time_is_outside_of_the_calendar_stops_no_other(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several file systems keep any number that a writer gives a file as its time."""
    desk.put("a.md")
    desk.put("b.md")
    info = LocalFileSystem.info
    monkeypatch.setattr(LocalFileSystem, "info", lambda fs, path, **more: {**info(fs, path, **more), "mtime": 1e14})
    source = desk.source()
    assert sorted(await listing(source)) == ["a.md", "b.md"]
    document = await one(source, "a.md")
    assert isinstance(document, Document)
    assert document.source_modified_at is None


@pytest.mark.slow
@pytest.mark.parametrize("desk", ["s3"], indirect=True)
async def test_an_object_that_is_named_like_a_version_of_another_one_is_not_read_in_its_place(desk: Desk) -> None:
    """s3fs takes the end of such a name for a version: the text of an excluded object was read."""
    desk.put("drop/salaries.md", "Salaries.")
    import botocore.session

    bucket, _, prefix = desk.url.removeprefix("s3://").partition("/")
    client = botocore.session.get_session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=desk.settings["endpoint_url"],
        aws_access_key_id=desk.secrets["key"],
        aws_secret_access_key=desk.secrets["secret"],
    )
    client.put_object(Bucket=bucket, Key=f"{prefix}/drop/salaries.md?versionId=a.md", Body=b"Harmless.")
    desk.put("drop/b.md")
    source = desk.source(exclude=["**/salaries.md"])
    assert list(await listing(source)) == ["drop/b.md"]
    name = "drop/salaries.md?versionId=a.md"
    assert await one(source, name) == Gone(name)


@pytest.mark.parametrize("desk", LINKING, indirect=True)
async def test_symbolic_links_do_not_lead_out_of_the_address(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.md").write_text("A secret.")
    desk.put("real/a.md")
    (_folder_of(desk) / "linked").symlink_to(tmp_path / "elsewhere")
    (_folder_of(desk) / "real" / "b.md").symlink_to(tmp_path / "elsewhere" / "secret.md")
    source = desk.source()
    assert list(await listing(source)) == ["real/a.md"]
    for name in ("linked/secret.md", "real/b.md"):
        assert await one(source, name) == Gone(name)
    assert isinstance(await one(source, "real/a.md"), Document)


async def test_an_object_that_grows_before_it_is_read_is_not_copied_whole(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.put("a.md")
    source = desk.source(max_file_bytes=100_000)
    find = source._store.find

    def find_and_grow(path: str) -> object:
        stored = find(path)
        desk.put(path, "x" * 3_000_000)
        return stored

    monkeypatch.setattr(source._store, "find", find_and_grow)
    grown = await one(source, "a.md")
    assert isinstance(grown, Unreadable)
    assert grown.code == "too_large"
    assert list(desk.folder.iterdir()) == []


# Large folders


async def test_a_sidecar_file_restricts_every_page_of_a_folder(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_store, "PAGE", 2)
    monkeypatch.setattr(objects_source, "PAGE_LISTED", 2)
    names = {f"board/{name}.md" for name in ("(a)", "b", "c", "d", "e", "f")}
    for name in names:
        desk.put(name)
    desk.put("board/.penstock.toml", 'acl = ["board"]')
    listed = await listing(desk.source(sidecars=True))
    assert set(listed) == names
    assert {tuple(entry.acl_tags) for entry in listed.values()} == {("board",)}


@pytest.mark.parametrize("desk", ["file"], indirect=True)
async def test_memory_does_not_grow_with_the_size_of_a_folder(desk: Desk) -> None:
    folder = _folder_of(desk)
    folder.mkdir(parents=True)
    for number in range(8_000):
        (folder / f"document-{number:06}.md").write_text("x")
    source = desk.source()
    tracemalloc.start()
    try:
        count = 0
        async for page in source.list():
            count += len(page)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 8_000
    assert peak < 4_000_000, "a page takes two megabytes; all took eight"


async def test_a_folder_of_s3_is_listed_with_one_request_for_each_page(tmp_path: Path) -> None:
    fake = FakeS3()
    for number in range(2_500):
        fake.put(f"docs/{number:06}.md", b"Some text.")
    requests: list[str] = []

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            requests.append(scope["path"])
        await fake(scope, receive, send)

    async with served(counted) as address:
        secrets = {"key": KEY, "secret": SECRET}
        source = Desk(f"s3://{BUCKET}/docs", tmp_path, {"endpoint_url": address}, secrets).source()
        made, names = [], []
        async for page in source.list():
            made.append(len(requests))
            names += [entry.external_id for entry in page if isinstance(entry, Listed)]
        await source.close()
    assert made == [1, 2, 3]
    assert names == [f"{number:06}.md" for number in range(2_500)]


async def test_objects_that_their_writer_has_encrypted_stop_no_other(tmp_path: Path) -> None:
    """S3 refuses to describe such an object: whoever could write one stopped the store, and so its revocations."""
    fake = FakeS3(encrypted={"docs/a/secret.md", "docs/b/.penstock.toml"})
    for name in ("a/open.md", "a/secret.md", "b/.penstock.toml", "b/closed.md"):
        fake.put(f"docs/{name}", b"Some text.")
    async with served(fake) as address:
        secrets = {"key": KEY, "secret": SECRET}
        source = Desk(f"s3://{BUCKET}/docs", tmp_path, {"endpoint_url": address}, secrets).source(sidecars=True)
        listed = [entry async for page in source.list() for entry in page]
        [open_] = await source.fetch(["a/open.md"])
        [secret] = await source.fetch(["a/secret.md"])
        [closed] = await source.fetch(["b/closed.md"])
        await source.close()
    assert [entry.external_id for entry in listed if isinstance(entry, Listed)] == ["a/open.md", "a/secret.md"]
    assert [entry.id_prefix for entry in listed if isinstance(entry, Unlisted)] == ["b/"]
    assert isinstance(open_, Document)
    assert isinstance(secret, Unreadable)
    assert (secret.code, secret.message) == ("unavailable", "secret.md cannot be read, because the store refuses it")
    assert isinstance(closed, Unreadable)
    assert (closed.code, closed.acl_tags) == ("bad_rules", ())


@pytest.mark.parametrize("desk", ["memory"], indirect=True)
async def test_an_object_that_fails_while_the_store_answers_stops_no_other(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.put("a.md")
    source, info = desk.source(), MemoryFileSystem.info

    def failing(fs: MemoryFileSystem, path: str, **more: Any) -> Any:
        if path.endswith("a.md"):
            raise OSError("Failure")  # as paramiko reports any failure of a server
        return info(fs, path, **more)

    monkeypatch.setattr(MemoryFileSystem, "info", failing)
    for _ in range(MAX_FAILURES - 1):
        with pytest.raises(Retryable):
            await source.fetch(["a.md"])
    checks, check = [], source._store.check
    monkeypatch.setattr(source._store, "check", lambda: checks.append(check()))
    entry = await one(source, "a.md")
    assert isinstance(entry, Unreadable)
    assert len(checks) == 1
    assert entry.code == "unavailable"
    monkeypatch.undo()
    assert isinstance(await one(source, "a.md"), Document)


@pytest.mark.parametrize("desk", ["memory"], indirect=True)
async def test_a_store_that_does_not_answer_is_no_reason_to_set_an_object_aside(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.put("a.md")

    def failing(*_details: Any, **_more: Any) -> Any:
        raise OSError("Failure")

    source = desk.source()
    monkeypatch.setattr(MemoryFileSystem, "info", failing)
    monkeypatch.setattr(MemoryFileSystem, "ls", failing)
    for _ in range(MAX_FAILURES + 1):
        with pytest.raises(Retryable):
            await source.fetch(["a.md"])


@pytest.mark.parametrize("desk", ["memory"], indirect=True)
async def test_folders_within_very_many_others_are_set_aside(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs requests of its own, and an object of a kilobyte may be within five hundred."""
    monkeypatch.setattr(objects_source, "MAX_DEPTH", 3)
    for depth in (0, 3, 4, 9):
        desk.put("/".join([*"abcdefghi"[:depth], "x.md"]))
    listed = [entry async for page in desk.source().list() for entry in page]
    assert sorted(entry.external_id for entry in listed if isinstance(entry, Listed)) == ["a/b/c/x.md", "x.md"]
    assert [entry.id_prefix for entry in listed if isinstance(entry, Unlisted)] == ["a/b/c/"]


@pytest.mark.parametrize("desk", ["memory"], indirect=True)
async def test_patterns_and_sidecars_are_looked_into_in_threads(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a megabyte kept all connectors from their turns for half an hour, and its patterns for a second at
    each object."""
    threads: set[int] = set()
    with_file, admits_file = Policy.with_file, Policy.admits_file

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            threads.add(get_ident())
            return function(*arguments)

        return call

    monkeypatch.setattr(Policy, "with_file", noted(with_file))
    monkeypatch.setattr(Policy, "admits_file", noted(admits_file))
    desk.put("a/.penstock.toml", 'exclude = ["*.tmp"]')
    desk.put("a/b.md")
    source = desk.source(sidecars=True)
    assert [entry async for page in source.list() for entry in page]
    assert isinstance(await one(source, "a/b.md"), Document)
    assert threads
    assert get_ident() not in threads


@pytest.mark.parametrize("desk", ["memory"], indirect=True)
async def test_a_folder_that_vanishes_while_it_is_listed_is_not_listed_whole(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documents of its next page would be deleted."""
    monkeypatch.setattr(objects_store, "PAGE", 2)
    for name in "abc":
        desk.put(f"{name}.md")
    entries = Store._entries

    def vanishing(store: Store, fs: Any, path: str) -> Iterator[Mapping[str, Any]]:
        for number, entry in enumerate(entries(store, fs, path)):
            if number == 2:
                raise FileNotFoundError
            yield entry

    monkeypatch.setattr(Store, "_entries", vanishing)
    with pytest.raises(Retryable, match="the memory store does not respond"):
        await listing(desk.source())


@pytest.mark.parametrize("desk", ["memory"], indirect=True)
async def test_a_folder_of_too_many_folders_is_set_aside(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/b.md", *(f"many/{number}/c.md" for number in range(20))):
        desk.put(name)
    monkeypatch.setattr(objects_source, "WAITING_BYTES", 1_000)
    entries = [entry async for page in desk.source().list() for entry in page]
    assert [entry for entry in entries if isinstance(entry, Unlisted)] == [
        Unlisted(part="folder many", reason="it holds too many folders: divide it", id_prefix="many/")
    ]
    assert "a/b.md" in [entry.external_id for entry in entries if isinstance(entry, Listed)]


@pytest.mark.parametrize("desk", [pytest.param("sftp", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("name", ["x.md", os.fsdecode(b"caf\xe9.md")])
async def test_a_folder_of_too_many_names_is_set_aside(desk: Desk, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Names that are not UTF-8 are listed in another way."""
    for path in ("a/b.md", *(f"many/{number}.md" for number in range(20))):
        desk.put(path)
    (_folder_of(desk) / "many" / name).write_text("A text.")
    source = desk.source()
    assert len(await listing(source)) == (22 if name == "x.md" else 21)
    monkeypatch.setattr(sftp, "MOST_NAMES", 10)
    for _ in range(2):
        entries = [entry async for page in source.list() for entry in page]
        assert [entry for entry in entries if isinstance(entry, Unlisted)] == [
            Unlisted(part="folder many", reason="it holds more than 200,000 names: divide it", id_prefix="many/")
        ]
        assert [entry.external_id for entry in entries if isinstance(entry, Listed)] == ["a/b.md"]
    assert isinstance(await one(source, "many/1.md"), Document)


# One store


async def test_a_protocol_without_its_package_is_named_with_what_to_install(tmp_path: Path) -> None:
    source = Desk("gs://bucket/docs", tmp_path).source()
    with pytest.raises(Misconfigured, match="the protocol gs needs a package that is not installed: pip install"):
        await listing(source)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"url": "bucket/docs"}, "write an address such as s3://bucket/prefix"),
        ({"url": "https://example.com/docs"}, "a web server has no listing"),
        ({"url": "simplecache::s3://bucket/docs"}, "write an address"),
        ({"settings": {"secret": "x"}}, "settings.secret is a secret: it is the option secret, set in the environment"),
        ({"source_url": "https://files.example/"}, "write an https address with {path}"),
    ],
)
def test_options_are_refused_with_one_line(more: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=says) as refused:
        Desk("s3://bucket/docs", tmp_path).source(**more)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("desk", [pytest.param("sftp", marks=pytest.mark.slow)], indirect=True)
async def test_a_server_of_sftp_is_trusted_only_by_its_host_key(desk: Desk, tmp_path: Path) -> None:
    import paramiko

    desk.put("a.md")
    (tmp_path / "empty").write_text("")
    other = desk.server.write_known_hosts(tmp_path / "other", paramiko.ECDSAKey.generate())
    for file, says in ((tmp_path / "empty", "is not in known_hosts: compare it"), (other, "another host key")):
        with pytest.raises(Misconfigured, match=says):
            await listing(desk.source(settings={"known_hosts": str(file)}))
    wrong = Desk(desk.url, desk.folder, desk.settings, {"password": "wrong"})
    with pytest.raises(Misconfigured, match="refuses the credentials") as refused:
        await listing(wrong.source())
    assert "wrong" not in str(refused.value)


@pytest.mark.parametrize("desk", [pytest.param("sftp", marks=pytest.mark.slow)], indirect=True)
async def test_objects_that_are_read_at_once_do_not_take_each_others_responses(desk: Desk) -> None:
    names = [f"{number}.md" for number in range(40)]
    for name in names:
        desk.put(name, f"About {name}. " * 10_000)
    for name, entry in zip(names, await desk.source().fetch(names), strict=True):
        assert isinstance(entry, Document)
        assert entry.content.startswith(f"About {name}.")


@pytest.mark.parametrize("desk", [pytest.param("sftp", marks=pytest.mark.slow)], indirect=True)
async def test_a_lost_connection_is_opened_again(desk: Desk) -> None:
    desk.put("a.md")
    source = desk.source()
    await listing(source)
    desk.server.disconnect()
    with pytest.raises(Retryable, match="the sftp store does not respond"):
        await listing(source)
    assert list(await listing(source)) == ["a.md"]


@pytest.mark.parametrize("desk", [pytest.param("sftp", marks=pytest.mark.slow)], indirect=True)
async def test_a_folder_that_denies_access_is_set_aside(desk: Desk) -> None:
    desk.put("a.md")
    desk.put("closed/b.md")
    desk.server.denied.add("closed")
    entries = [entry async for page in desk.source().list() for entry in page]
    assert [entry for entry in entries if isinstance(entry, Unlisted)] == [
        Unlisted(part="folder closed", reason="the store denies access to it", id_prefix="closed/")
    ]
    assert [entry.external_id for entry in entries if isinstance(entry, Listed)] == ["a.md"]
    desk.server.denied.add("docs")
    with pytest.raises(Misconfigured, match="the sftp store denies access"):
        await listing(desk.source())


@pytest.mark.parametrize("desk", [pytest.param("sftp", marks=pytest.mark.slow)], indirect=True)
async def test_an_object_that_denies_access_does_not_stop_the_others(desk: Desk) -> None:
    for name in ("a.md", "b.md", "board/.penstock.toml", "board/c.md"):
        desk.put(name, "" if name.endswith("toml") else "Some text.")
    source = desk.source(sidecars=True)
    desk.server.denied.add("a.md")
    [denied, other] = await source.fetch(["a.md", "b.md"])
    assert isinstance(denied, Unreadable)
    assert (denied.code, denied.message) == (
        "access_denied",
        "the store denies access to a.md: allow the account to read it",
    )
    assert isinstance(other, Document)
    desk.server.denied.add(".penstock.toml")
    [without_rules] = await source.fetch(["board/c.md"])
    assert isinstance(without_rules, Unreadable)
    assert (without_rules.code, without_rules.acl_tags) == ("bad_rules", ())
    desk.server.denied.add("docs")
    for name in ("a.md", "board/c.md"):
        with pytest.raises(Misconfigured, match="the sftp store denies access"):
            await source.fetch([name])
