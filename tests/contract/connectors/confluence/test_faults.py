"""Confluence, when things go wrong: waits, expired cursors, hostile addresses, missing rights."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from connectors.fakes.atlassian_limits import RateLimits
from connectors.source import CursorExpired, Document, Unlisted, Unreadable
from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.runtime.http_server import served
from tests.support.connectors.confluence_kit import Wiki, wiki


async def test_responses_429_and_500_are_retried(site: Wiki) -> None:
    ids = {site.page(f"Page {n}").id for n in range(4)}
    site.fake.faults.throttled, site.fake.faults.retry_after = 3, "0"
    assert set(await site.full()) == ids
    site.fake.faults.failing = 2
    assert set(await site.slim()) == ids


async def test_an_exhausted_rate_limit_is_retryable_after_its_reset(site: Wiki) -> None:
    site.page("Page")
    site.fake.faults.headers = {
        "X-RateLimit-Limit": "100",
        "X-RateLimit-Remaining": "0",
        "X-RateLimit-Reset": datetime.fromtimestamp(time.time() + 3_600, UTC).isoformat(),
    }
    with pytest.raises(Retryable) as raised:
        await site.full()
    assert raised.value.retry_after is not None
    assert raised.value.retry_after > 60


async def test_a_full_read_with_an_expired_cursor_raises_and_can_start_again(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        ids = {site.page(f"Page {n}").id for n in range(8)}
        pages = site.source.full(None)
        first = await anext(pages)
        site.fake.expire_cursors()
        with pytest.raises(CursorExpired):
            await anext(pages)
        with pytest.raises(CursorExpired):
            await site.full(first.cursor)
        assert set(await site.full()) == ids


async def test_a_listing_whose_cursor_expires_is_retryable(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        for n in range(8):
            site.page(f"Page {n}")
        listing = site.source.slim()
        await anext(listing)
        site.fake.expire_cursors()
        with pytest.raises(Retryable):
            await anext(listing)
        assert len(await site.slim()) == 8


async def test_a_space_whose_listing_fails_midway_is_set_aside(site: Wiki) -> None:
    for n in range(8):
        site.page(f"Page {n}")
    listing = site.source.slim()
    await anext(listing)
    site.fake.faults.denied = {"/content", "/pages"}
    rest = [entry async for page in listing for entry in page]
    unlisted = {entry.part: entry.tag for entry in rest if isinstance(entry, Unlisted)}
    assert unlisted["pages of space ENG"] == "space:ENG"
    assert set(unlisted.values()) == {"space:ENG"}


async def test_a_listing_in_which_every_space_fails_raises(site: Wiki) -> None:
    site.page("Page")
    site.fake.faults.denied = {"/content", "/pages", "/blogposts"}
    with pytest.raises(Misconfigured):
        await site.slim()
    with pytest.raises(Misconfigured):
        await site.full()


async def test_an_archived_space_that_the_settings_name_is_set_aside(site: Wiki) -> None:
    """Its pages are not deleted, neither by a sweep nor when an event names them."""
    page, old = site.page("Page"), site.state.add_space("OLD", groups={"staff"})
    archived = site.state.add_page("OLD", "Archived", "<p>Long ago.</p>")
    source = site.source = site.connect(spaces=["ENG", "OLD"])
    assert set(await site.full()) == {page.id, archived.id}
    old.status = "archived"
    assert set(await site.full()) == {page.id}
    assert await site.unlisted() == {"space OLD": "space:OLD"}
    assert await source.fetch([archived.id]) == []
    (problem,) = await source.check()
    assert (problem.path, "OLD" in problem.message, "ENG" in problem.message) == ("spaces", True, False)


async def test_a_listing_with_a_page_that_fails_is_read_in_smaller_pages(tmp_path: Path) -> None:
    async with wiki("data-center", tmp_path) as site:
        ids = {site.page(f"Page {n}").id for n in range(8)}
        site.source = site.connect(page_size=50, patient=False)
        site.fake.faults.largest = 3
        assert set(await site.full()) == ids
        assert set(await site.slim()) == ids


async def test_a_search_that_ends_early_is_divided_by_time(site: Wiki) -> None:
    cursor = await site.source.start()
    for n in range(4):
        site.page(f"Page {n}")
        site.state.advance(minutes=1)
    site.fake.faults.searchable = 2
    site.source = site.connect(page_size=2)
    entries, _ = await site.changes(cursor)
    assert len({entry.external_id for entry in entries}) == 4


async def test_responses_that_are_not_confluences_raise_without_quoting_them(site: Wiki) -> None:
    for answer in ({"results": "none"}, {"hello": "world"}, [], {"results": [{}], "_links": {}}):
        app = Starlette(routes=[Route("/{path:path}", lambda _, answer=answer: JSONResponse(answer))])
        async with served(app) as address:
            source = site.connect(base_url=address + site.fake.context)
            for asking in (source.start(), source.fetch(["1"]), anext(source.full(None)), anext(source.slim())):
                with pytest.raises((Retryable, Misconfigured)) as raised:
                    await asking
                assert "world" not in str(raised.value)


async def test_a_listing_whose_next_link_never_advances_raises(site: Wiki) -> None:
    def circle(request: Request) -> Response:
        return JSONResponse({"results": [], "_links": {"next": "/x?cursor=again&start=0"}})

    async with served(Starlette(routes=[Route("/{path:path}", circle)])) as address:
        source = site.connect(base_url=address + site.fake.context)
        with pytest.raises(PenstockError):
            await source.start()


async def test_an_attachment_redirected_to_an_unlisted_host_is_not_followed(site: Wiki) -> None:
    """And whoever is named there sees neither the request nor the token."""
    seen: list[str] = []

    def elsewhere(request: Request) -> Response:
        seen.append(str(request.headers))
        return Response(b"from elsewhere")

    file = site.state.attach(site.page("Page").id, "a.txt", b"words", "text/plain")
    async with served(Starlette(routes=[Route("/{path:path}", elsewhere)])) as address:
        for target in (f"{address}/stolen", "http://169.254.169.254/latest/meta-data", "file:///etc/passwd"):
            site.fake.faults.moved_to = target
            (entry,) = await site.source.fetch([file.id])
            assert isinstance(entry, Unreadable)
            assert (entry.code, entry.acl_tags) == ("forbidden_address", ("space:ENG",))
        assert seen == []
        site.fake.faults.moved_to = f"{address}/media"
        site.source = site.connect(media_hosts=[address.removeprefix("http://")])
        (entry,) = await site.source.fetch([file.id])
        assert isinstance(entry, Document)
        assert entry.content == "from elsewhere"
        assert len(seen) == 1
        assert "authorization" not in seen[0].lower()


async def test_no_log_line_or_error_holds_a_secret_or_page_content(
    site: Wiki, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    canary = "CANARY-IN-A-PAGE"
    page = site.page("Page", f"<p>{canary}</p>")
    site.state.attach(page.id, "a.txt", canary.encode(), "text/plain")
    texts = [repr(site.source), repr(site.source._options), str(await site.source.check())]
    await site.full()
    site.fake.faults.denied = {"/permissions", "byOperation"}
    await site.groups()
    site.fake.faults.denied = {"/"}
    for asking in (site.full(), site.groups(), site.source.start()):
        with pytest.raises(PenstockError) as error:
            await asking
        texts += [str(error.value), repr(error.value)]
    text = caplog.text + "".join(texts)
    for secret in (*site.fake.credentials, canary, "what both sides know"):
        assert secret not in text


# What check says


async def test_check_reports_no_problem_when_everything_is_permitted(site: Wiki) -> None:
    site.page("Page")
    assert await site.source.check() == []


async def test_check_reports_a_wrong_token_without_quoting_it(site: Wiki) -> None:
    (problem,) = await site.connect(token="wrong").check()
    assert problem.code == "token"
    assert "401" in problem.message
    assert "wrong" not in problem.message


async def test_check_reports_a_wrong_address(site: Wiki) -> None:
    root = site.url.removesuffix(site.fake.context)
    problems = await site.connect(base_url=root).check()
    assert [problem.code for problem in problems] == ["address"]
    assert ("lacks /wiki" in problems[0].message) == site.fake.cloud


async def test_check_names_an_unknown_space(site: Wiki) -> None:
    (problem,) = await site.connect(spaces=["ENG", "NOPE"]).check()
    assert "NOPE" in problem.message
    assert "ENG" not in problem.message


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("read:space:confluence", "spaces"),
        ("read:space.permission:confluence", "who may read space ENG"),
        ("read:page:confluence", "pages of space ENG"),
        ("search:confluence", "search"),
        ("read:content.restriction:confluence", "view restrictions"),
        ("read:comment:confluence", "a page with its comments"),
        ("read:group:confluence", "members of groups"),
    ],
)
async def test_check_names_the_missing_scope(tmp_path: Path, missing: str, named: str) -> None:
    every = {
        "read:user:confluence",
        "read:space:confluence",
        "read:space.permission:confluence",
        "read:page:confluence",
        "read:content.metadata:confluence",
        "read:content.restriction:confluence",
        "read:comment:confluence",
        "read:attachment:confluence",
        "read:group:confluence",
        "search:confluence",
        "readonly:content.attachment:confluence",
    }
    async with wiki("cloud", tmp_path) as site:
        site.page("Page")
        assert await site.connect(email=None, token=site.fake.token_for(site.bot, scopes=every)).check() == []
        problems = await site.connect(email=None, token=site.fake.token_for(site.bot, scopes=every - {missing})).check()
        assert any(missing in problem.message and problem.message.startswith(named) for problem in problems), problems
        assert all(problem.code in ("scope",) for problem in problems)


async def test_check_names_the_missing_permission(tmp_path: Path) -> None:
    async with wiki("data-center", tmp_path) as site:
        site.fake.faults.denied = {"/permissions"}
        (problem,) = await site.source.check()
        assert problem.code == "permission"
        assert "“Admin” of that space" in problem.message


async def test_check_reports_hidden_addresses_and_spaces_without_readers(site: Wiki) -> None:
    site.bot.shows_email = False
    site.state.spaces["ENG"].readers.users.clear()
    site.state.spaces["ENG"].readers.groups.clear()
    site.bot.sees_all = True
    source = site.connect(**({} if site.fake.cloud else {"email_domain": None}))
    assert {problem.code for problem in await source.check()} == {"addresses_hidden", "nobody"}


async def test_bursts_beyond_the_rate_limit_are_waited_out(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        ids = {site.page(f"Page {n}").id for n in range(8)}
        site.fake.limits = RateLimits(per_second=2, burst=1)
        assert set(await site.full()) == ids
        assert site.fake.limits.refused.total() > 0


async def test_a_spent_quota_is_waited_for_without_a_refusal(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        ids = {site.page(f"Page {n}").id for n in range(8)}
        site.source = site.connect(concurrent_requests=1)  # a request that is under way may still be refused
        site.fake.limits = RateLimits(points=20, window_seconds=2)
        assert set(await site.full()) == ids
        assert site.fake.limits.points_spent > 20
        assert site.fake.limits.refused.total() == 0


async def test_a_burst_limit_of_groups_does_not_delay_pages(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        ids = {site.page(f"Page {n}").id for n in range(8)}
        for n in range(33):
            site.state.groups[f"team-{n}"] = {site.ann.account_id}
            site.state.spaces["ENG"].readers.groups.add(f"team-{n}")
        site.fake.limits = RateLimits(per_second=0.001, burst=30)
        with pytest.raises(Retryable):  # the members of a group are one request
            await site.groups()
        assert set(await site.full()) == ids
