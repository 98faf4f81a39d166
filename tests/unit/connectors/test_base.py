"""Sources that implement list and read alone: what the defaults make of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from connectors.base import ReadersOptions, SmallSource, StrictOptions, WebOptions, WebSource
from connectors.operate import TemporaryMemory
from connectors.source import Context, CursorExpired, Document, Entry, Gone, Group, Listed, Unlisted, Unreadable
from connectors.web import Missing
from pipeline.core.errors import Misconfigured
from pipeline.runtime.http_server import served

SERVICE = {
    name: Document(external_id=name, title=name, content="text", acl_tags=["staff"], revision="1") for name in "cabed"
}


class Service(SmallSource):
    """A service of the documents, whose listing has two on a page."""

    Options = ReadersOptions
    page_documents = 2
    documents: Mapping[str, Entry] = SERVICE
    tags: Sequence[str] = ("staff",)
    """The tags in the listing."""
    reading = 0
    most_reading = 0

    async def list(self) -> AsyncIterator[Sequence[Listed]]:
        names = [*self.documents]
        for at in range(0, len(names), 2):
            yield [Listed(external_id=name, acl_tags=self.tags, revision="1") for name in names[at : at + 2]]

    async def read(self, external_id: str) -> Entry:
        self.reading += 1
        self.most_reading = max(self.reading, self.most_reading)
        await asyncio.sleep(0)
        self.reading -= 1
        if external_id not in self.documents:
            raise Missing("the service answers with 404", status=404)
        return self.documents[external_id]


def service(tmp_path: Path, options: StrictOptions | None = None, documents: Mapping[str, Entry] = SERVICE) -> Service:
    context = Context(name="wiki", tenant="acme", memory=TemporaryMemory(), folder=tmp_path)
    source = Service(options or ReadersOptions(members={"staff": ["ann"]}), context)
    source.documents = documents
    return source


async def collected(pages: Any) -> list[Any]:
    return [page async for page in pages]


async def test_a_full_read_returns_what_is_listed_and_continues_from_a_cursor(tmp_path: Path) -> None:
    source = service(tmp_path)
    pages = await collected(source.full(None))
    assert [[entry.external_id for entry in page.entries] for page in pages] == [["a", "b"], ["c", "d"], ["e"]]
    source.documents = {**SERVICE, "aa": SERVICE["a"]}  # written meanwhile, before the cursor
    rest = await collected(source.full(pages[0].cursor))
    assert [entry.external_id for page in rest for entry in page.entries] == ["c", "d", "e"]


async def test_a_document_that_the_service_does_not_find_is_gone(tmp_path: Path) -> None:
    entries = await service(tmp_path).fetch(["a", "z"])
    assert entries == [SERVICE["a"], Gone("z")]


async def test_reads_of_one_fetch_run_concurrently_within_their_limit(tmp_path: Path) -> None:
    source = service(tmp_path)
    source.reads_at_once = 3
    await source.fetch(list("abcde"))
    assert source.most_reading == 3


async def test_a_source_without_a_log_of_changes_has_no_cursor_and_gives_up_an_old_one(tmp_path: Path) -> None:
    source = service(tmp_path)
    assert await source.start() is None
    with pytest.raises(CursorExpired):
        await collected(source.changes({"since": 4}))


async def test_readers_of_the_settings_are_its_groups(tmp_path: Path) -> None:
    file = tmp_path / "members.toml"
    file.write_text('board = ["bob"]\n')
    source = service(tmp_path, ReadersOptions(members={"staff": ["ann"], "board": []}, members_file=file))
    assert await collected(source.groups()) == [Group("board", ["bob"]), Group("staff", ["ann"])]
    assert await collected(source.groups(["staff"])) == [Group("staff", ["ann"])]
    file.write_text("board = 3\n")
    with pytest.raises(Misconfigured, match="principal"):
        await collected(source.groups())


async def test_blocking_calls_run_in_a_bounded_number_of_threads(tmp_path: Path) -> None:
    source = service(tmp_path)
    source.blocking_threads = 2
    both = threading.Barrier(2, timeout=10)
    names = set(await asyncio.gather(*(source.blocking(_thread, both) for _ in range(4))))
    assert len(names) == 2
    await source.close()


def _thread(barrier: threading.Barrier) -> str:
    barrier.wait()
    return threading.current_thread().name


async def test_check_is_silent_where_all_is_well(tmp_path: Path) -> None:
    assert await service(tmp_path).check() == []


async def test_check_names_a_tag_without_a_holder(tmp_path: Path) -> None:
    [problem] = await service(tmp_path, ReadersOptions()).check()
    assert problem.code == "nobody"
    assert str(problem) == "wiki: nobody holds the tag 'staff': name its holders in members or members_file"


async def test_check_says_that_documents_without_tags_have_no_reader(tmp_path: Path) -> None:
    source = service(tmp_path, documents={id_: replace(entry, acl_tags=[]) for id_, entry in SERVICE.items()})
    source.tags = ()
    [problem] = await source.check()
    assert problem.code == "nobody"
    assert str(problem).endswith("and what is listed with it: set acl_tags")


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"revision": "2"}, "revision"),
        ({"acl_tags": ["board"]}, "acl_tags"),
        ({"required_tags": ["x"]}, "required_tags"),
    ],
)
async def test_check_finds_a_listing_that_contradicts_what_is_read(
    tmp_path: Path, changed: Mapping[str, Any], difference: str
) -> None:
    first = next(iter(SERVICE))
    source = service(tmp_path, documents={**SERVICE, first: replace(SERVICE[first], **changed)})
    [problem] = await source.check()
    assert problem.code == "listed_differently"
    assert f"another {difference} " in problem.message


async def test_check_says_that_edits_are_not_noticed_without_revisions(tmp_path: Path) -> None:
    class Bare(Service):
        async def list(self) -> AsyncIterator[Sequence[Listed]]:
            yield [Listed(external_id="a", acl_tags=["user:ann"])]

    source = Bare(StrictOptions(), service(tmp_path).context)
    source.documents = {"a": Unreadable(external_id="a", code="empty", message="is empty", acl_tags=["user:ann"])}
    assert [problem.code for problem in await source.check()] == ["no_revision"]


async def test_a_listing_of_documents_is_one_of_their_access_and_revision(tmp_path: Path) -> None:
    class Listing(Service):
        async def list(self) -> AsyncIterator[Sequence[Document | Unlisted]]:  # type: ignore[override]  # not Listed
            yield [SERVICE["a"], Unlisted(part="space b", reason="denied")]

    source = Listing(ReadersOptions(), service(tmp_path).context)
    listed = Listed(external_id="a", acl_tags=["staff"], revision="1")
    assert await collected(source.slim()) == [[listed, Unlisted(part="space b", reason="denied")]]


async def test_a_web_source_sends_its_token(tmp_path: Path) -> None:
    sent = []

    async def respond(request: Request) -> JSONResponse:
        sent.append(request.headers.get("authorization"))
        return JSONResponse({})

    async with served(Starlette(routes=[Route("/me", respond)])) as url:
        for token in (None, "opens-nothing-else"):
            source = WebSource(WebOptions(url=url, token=token), service(tmp_path).context)
            await source.web.json("GET", "/me")
            await source.close()
    assert sent == [None, "Bearer opens-nothing-else"]


async def test_a_check_names_a_tag_that_is_no_text(tmp_path: Path) -> None:
    source = service(tmp_path)
    numbers: Any = ["staff", 17]
    source.tags = numbers
    [problem] = await source.check()
    assert problem.message == "a tag that list shows is int: return text, or leave it out"


async def test_a_check_names_a_revision_that_is_no_text(tmp_path: Path) -> None:
    class Numbered(Service):
        async def list(self) -> AsyncIterator[Sequence[Listed]]:
            number: Any = 17
            yield [Listed(external_id="a", acl_tags=["staff"], revision=number)]

    context = Context(name="wiki", tenant="acme", memory=TemporaryMemory(), folder=tmp_path)
    [problem] = await Numbered(ReadersOptions(members={"staff": ["ann"]}), context).check()
    assert problem.message == "revision of Listed is int: return text, or None"
