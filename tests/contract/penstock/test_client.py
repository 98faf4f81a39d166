"""Both clients on the real service: what they return, what they raise, which token they send, and what they repeat."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import pytest_asyncio
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from connectors.git.playground import certificate
from deploy.certificates import Authority
from penstock.client import (
    AnswerResponse,
    CitationEvent,
    DeltaEvent,
    InvalidResponse,
    ProblemError,
    SearchFilters,
    SourcesEvent,
    Unreachable,
    calls,
)
from pipeline.runtime.http_server import served
from tests.contract.penstock.conftest import TEXTS, QueryService
from tests.fakes.issuer import Issuer, issuing
from tests.faults.tcp_proxy import TcpProxy, tcp_proxy
from tests.support.hostile_server import sending
from tests.support.query.client_kit import KINDS, EitherClient, Kind, either
from tests.support.query.http_kit import TOKEN_FILE, as_, service_over, write_keys
from tests.support.query.library import document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]

QUESTION = "When does the harbour open?"
QUICK = {"attempts": 3, "longest_wait_seconds": 0.05}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@asynccontextmanager
async def asking(kind: Kind, service: QueryService, **options: Any) -> AsyncIterator[EitherClient]:
    """As the local user, who may read TEXTS."""
    async with either(kind, service.url, TOKEN_FILE, **options) as client:
        yield client


def unknown_fields(value: Any, place: str = "") -> list[str]:
    """The fields of a response that no model knows, at any depth."""
    if isinstance(value, list):
        return [name for part in value for name in unknown_fields(part, f"{place}[]")]
    if not isinstance(value, BaseModel):
        return []
    inner = [name for field, part in value for name in unknown_fields(part, f"{place}.{field}")]
    return [f"{place}.{name}" for name in value.model_extra or {}] + inner


# What is returned


async def test_a_search_returns_typed_passages_with_their_place(service: QueryService, kind: Kind) -> None:
    async with asking(kind, service) as client:
        response = await client.call("search", "harbour opens", top=1, filters=SearchFilters(authors=["Ada"]))
        nothing = await client.call("search", "harbour opens", filters=SearchFilters(sources=["elsewhere"]))
    assert [name for name in unknown_fields(response) if ".steps[]" not in name] == []
    [result] = response.results
    assert result.external_id == "harbour.md"
    assert result.citation() == "Rules › Harbour (https://wiki.example/harbour.md)"
    assert "opens at nine" in result.text
    assert json.loads(json.dumps(result.metadata()))["document_id"] == result.document_id
    assert (response.relevant, nothing.relevant, nothing.results) == (True, False, [])


async def test_documents_stories_facets_and_the_caller_are_typed(service: QueryService, kind: Kind) -> None:
    id_ = await service.id("default", "harbour.md")
    async with asking(kind, service) as client:
        read, story = await client.call("document", id_), await client.call("story", str(id_))
        facets, caller = await client.call("facets"), await client.call("me")
        pipeline, review = await client.call("pipeline"), await client.call("review", limit=5)
    assert (read.text, read.author, read.document_id) == (TEXTS["harbour.md"], "Ada", str(id_))
    assert (story.searchable, story.document["title"]) == (True, "Rules")
    assert (facets.sources, facets.authors) == (["wiki"], ["Ada"])
    assert (caller.tenant, caller.kind, caller.operator) == ("default", "development", True)
    assert [unknown_fields(part) for part in (read, facets, caller, review)] == [[]] * 4
    assert pipeline.at


async def test_an_answer_is_whole_or_a_stream_of_typed_events(service: QueryService, kind: Kind) -> None:
    async with asking(kind, service) as client:
        whole = await client.call("answer", QUESTION, mode="hybrid")
        first, *middle, last = await client.stream(QUESTION, mode="hybrid")
    assert isinstance(first, SourcesEvent)
    assert [passage.n for passage in first.passages] == list(range(1, len(first.passages) + 1))
    assert {type(event) for event in middle} == {DeltaEvent, CitationEvent}
    assert isinstance(last, AnswerResponse)
    assert "".join(event.text for event in middle if isinstance(event, DeltaEvent)).strip() == last.answer
    assert (whole.answer, whole.citations, whole.model) == (last.answer, last.citations, "copyist")
    assert "nine" in whole.answer


async def test_the_events_of_the_service_match_its_description(service: QueryService) -> None:
    from jsonschema import Draft202012Validator  # here, because its import takes a second

    description = (await service.client.get("/openapi.json")).json()
    schema = {"$ref": "#/components/schemas/AnswerEvent", "components": description["components"]}
    body = {"question": QUESTION, "stream": True, "mode": "hybrid"}
    names = set()
    for question in (QUESTION, " "):
        response = await service.client.post("/v1/answers", json={**body, "question": question})
        for part in response.text.strip().split("\n\n"):
            name, data = part.split("\n")
            event = {"event": name.removeprefix("event: "), "data": json.loads(data.removeprefix("data: "))}
            Draft202012Validator(schema).validate(event)
            names.add(event["event"])
    assert names == {"sources", "delta", "citation", "done", "error"}


async def test_leaving_a_stream_stops_the_model(service: QueryService, kind: Kind) -> None:
    service.chat.faults.token_seconds = 0.5
    left = service.chat.stats.left
    try:
        async with asking(kind, service) as client:
            sources, piece = await client.stream(QUESTION, mode="hybrid", at_most=2)
            assert (type(sources), type(piece)) == (SourcesEvent, DeltaEvent)
            async with asyncio.timeout(20):
                while service.chat.stats.open or service.chat.stats.left == left:
                    await asyncio.sleep(0.01)
    finally:
        service.chat.faults.token_seconds = 0.0


async def test_feedback_and_reviews_reach_the_service(service: QueryService, kind: Kind) -> None:
    async with asking(kind, service) as client:
        answer = await client.call("answer", QUESTION)
        passages = await client.call("search", "crane")
        await client.call("feedback", "down", answer_id=answer.answer_id, note="shorter")
        await client.call("feedback", "up", chunk_id=passages.results[0].chunk_id, query="crane")
        with pytest.raises(ProblemError) as raised:
            await client.call("resolve", uuid4(), "right")
    assert raised.value.kind == "not-found"
    rows = await service.library.execute("SELECT verdict, note FROM answer_feedback ORDER BY given_at DESC LIMIT 2")
    assert sorted(rows) == [("down", "shorter"), ("up", None)]


# What is raised


async def test_an_error_has_the_services_words_and_the_id_of_the_request(service: QueryService, kind: Kind) -> None:
    async with asking(kind, service) as client:
        with pytest.raises(ProblemError) as missing:
            await client.call("document", uuid4())
        with pytest.raises(ProblemError) as invalid:
            await client.call("search", "harbour", top=1000)
        with pytest.raises(ProblemError) as streamed:
            await client.stream(" ")
    assert (missing.value.status, missing.value.kind) == (404, "not-found")
    assert missing.value.request_id
    assert [error.pointer for error in invalid.value.errors] == ["/top"]
    assert (streamed.value.status, streamed.value.kind, bool(streamed.value.request_id)) == (422, "bad-query", True)


async def test_the_token_is_in_no_error_and_no_representation(service: QueryService, kind: Kind) -> None:
    async with either(kind, service.url, "wrong-but-secret") as client:
        with pytest.raises(ProblemError) as raised:
            await client.call("me")
        assert raised.value.status == 401
        assert "secret" not in f"{raised.value} {raised.value!r} {vars(raised.value)} {client.client!r}"


async def test_a_service_that_does_not_run_is_unreachable(kind: Kind) -> None:
    async with either(kind, "http://127.0.0.1:9", "t", **QUICK) as client:
        with pytest.raises(Unreachable, match="no complete response from the service"):
            await client.call("me")
        with pytest.raises(Unreachable):
            await client.stream(QUESTION)


# The token


@pytest_asyncio.fixture(loop_scope="session")
async def issuer() -> AsyncIterator[Issuer]:
    async with issuing() as issuer:
        yield issuer


async def test_a_refused_token_is_renewed_once_and_an_expiring_one_before_it_is_refused(
    service: QueryService, issuer: Issuer, kind: Kind
) -> None:
    """With the tokens of an issuer that the service trusts."""
    tokens = [issuer.token(exp=int(time.time()) + 30), "x.y.z", issuer.token(), issuer.token(email="bob")]
    given: list[str] = []

    def renew() -> str:
        given.append(tokens[len(given)])
        return given[-1]

    async def renew_later() -> str:
        await asyncio.sleep(0)
        return renew()

    async with service_over(service.library, auth=issuer.settings()) as (http, _):
        source = renew if kind == "blocking" else renew_later
        async with either(kind, str(http.base_url), source) as client:
            assert (await client.call("me")).principal == "ann"
            assert len(given) == 1
            assert (await client.call("me")).principal == "ann"  # the first expires soon, and the second is refused
            assert len(given) == 3
            assert (await client.stream(" x ", mode="keyword"))[-1].relevant is False
            assert len(given) == 3


async def test_many_requests_at_once_renew_a_token_once(service: QueryService, kind: Kind) -> None:
    given: list[str] = []

    def renew() -> str:
        given.append("stale" if not given else TOKEN_FILE.read_text().split()[-1])
        return given[-1]

    async with asking(kind, service) as client, either(kind, service.url, renew) as renewing:
        assert (await client.call("me")).operator
        callers = await asyncio.gather(*(renewing.call("me") for _ in range(6)))
    assert {caller.kind for caller in callers} == {"development"}
    assert len(given) == 2


async def test_an_api_key_is_a_token(service: QueryService, kind: Kind, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.toml", bot={"key": "k-1", "tenant": "acme", "tags": ["user:ann"]})
    async with (
        service_over(service.library, auth={"keys_file": keys}) as (http, _),
        either(kind, str(http.base_url), "k-1") as client,
    ):
        assert (await client.call("me")).key == "bot"


async def test_further_headers_are_sent_with_each_request(service: QueryService, kind: Kind) -> None:
    await service.library.put(document("a.md", "A heron.", tenant="acme", acl_tags=["user:ann"]))
    headers = {name: value for name, value in as_("ann").items() if name != "Authorization"}
    async with asking(kind, service, headers=headers) as client:
        assert [result.external_id for result in (await client.call("search", "heron")).results] == ["a.md"]


# What is sent again

Reply = Callable[[Request], Response]


@asynccontextmanager
async def replies(*script: Reply) -> AsyncIterator[tuple[str, list[Request]]]:
    """A server that gives these replies, the last one for ever; yields its address and the requests."""
    requests: list[Request] = []

    async def reply(request: Request) -> Response:
        requests.append(request)
        return script[min(len(requests), len(script)) - 1](request)

    app = Starlette(routes=[Route("/{path:path}", reply, methods=["GET", "POST"])])
    async with served(app) as address:
        yield address, requests


def refusal(status: int, **headers: str) -> Reply:
    body = {"type": "urn:penstock:problem:busy", "title": "Service busy", "status": status, "detail": "retry"}
    return lambda _: JSONResponse(body, status, headers, "application/problem+json")


def caller(_: Request) -> Response:
    return JSONResponse(
        {"tenant": "acme", "principal": "ann", "key": None, "kind": "token", "class": "standard", "operator": False}
    )


NOW = {"Retry-After": "0"}


async def test_a_request_is_sent_again_when_a_busy_service_says_so(kind: Kind) -> None:
    async with (
        replies(refusal(503, **NOW), refusal(429, **NOW), caller) as (url, requests),
        either(kind, url) as client,
    ):
        assert (await client.call("me")).principal == "ann"
        assert len(requests) == 3


async def test_a_question_is_not_sent_again_once_the_service_may_work_on_it(kind: Kind) -> None:
    for reply, sent in ((refusal(503, **NOW), 1), (refusal(429, **NOW), 2)):
        async with replies(reply, refusal(404)) as (url, requests), either(kind, url) as client:
            for ask in (client.call("answer", QUESTION), client.stream(QUESTION)):
                requests.clear()
                with pytest.raises(ProblemError):
                    await ask
                assert len(requests) == sent


async def test_a_limit_that_asks_for_more_patience_than_the_client_has_is_raised(
    service: QueryService, kind: Kind
) -> None:
    """The real rate limit, which asks for up to a minute."""
    async with (
        service_over(service.library, serve={"requests_per_minute": 2}) as (http, _),
        either(kind, str(http.base_url), TOKEN_FILE, longest_wait_seconds=0.0) as client,
    ):
        outcomes = await asyncio.gather(*(client.call("me") for _ in range(5)), return_exceptions=True)
    [error, *_] = [outcome for outcome in outcomes if isinstance(outcome, ProblemError)]
    assert (error.kind, error.status) == ("rate-limited", 429)
    assert error.retry_after_seconds


async def test_many_requests_at_once_stay_below_the_limit_of_a_caller(service: QueryService, kind: Kind) -> None:
    """Sixty searches at once were refused and repeated until the rate limit was exhausted, too: they took a minute."""
    async with asking(kind, service, attempts=1) as client:
        responses = await asyncio.gather(*(client.call("search", f"harbour {n}") for n in range(30)))
    assert all(response.relevant for response in responses)


@asynccontextmanager
async def through_a_proxy(service: QueryService) -> AsyncIterator[tuple[str, TcpProxy]]:
    place = urlsplit(service.url)
    async with tcp_proxy(place.hostname, place.port) as proxy:
        yield f"http://127.0.0.1:{proxy.listening}", proxy


async def test_a_refused_connection_is_opened_again(service: QueryService, kind: Kind) -> None:
    async with through_a_proxy(service) as (url, proxy), either(kind, url, TOKEN_FILE, attempts=20) as client:
        proxy.refusing = True
        task = asyncio.create_task(client.call("search", "harbour"))
        await asyncio.sleep(0.3)
        assert not task.done()
        proxy.refusing = False
        assert (await task).relevant


async def test_a_stream_that_is_cut_off_raises_instead_of_ending(service: QueryService, kind: Kind) -> None:
    service.chat.faults.token_seconds = 0.5
    try:
        async with through_a_proxy(service) as (url, proxy), either(kind, url, TOKEN_FILE) as client:
            task = asyncio.create_task(client.stream(QUESTION, mode="hybrid"))
            async with asyncio.timeout(20):
                while not (service.chat.stats.open and proxy.returned_bytes):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # the client has read the head: before, it would send its request again
            proxy.cut()
            with pytest.raises(Unreachable):
                await task
    finally:
        service.chat.faults.token_seconds = 0.0


async def test_what_is_no_query_service_is_named(kind: Kind) -> None:
    page: Reply = lambda _: Response("<html>Sign in</html>", 200, media_type="text/html")  # noqa: E731
    moved: Reply = lambda _: Response(status_code=302, headers={"Location": "https://login.example"})  # noqa: E731
    for reply in (page, moved):
        async with replies(reply) as (url, _), either(kind, url, "t", **QUICK) as client:
            for ask in (client.call("me"), client.stream(QUESTION)):
                with pytest.raises(InvalidResponse):
                    await ask


async def test_a_response_that_is_too_large_is_refused(kind: Kind) -> None:
    packed = gzip.compress(bytes(calls.MAX_RESPONSE_BYTES + 1), 1)
    for status in (200, 500):
        page: Reply = lambda _, status=status: Response(packed, status, headers={"Content-Encoding": "gzip"})  # noqa: E731
        async with replies(page) as (url, _), either(kind, url, "t", **QUICK) as client:
            with pytest.raises(InvalidResponse, match="larger than"):
                await client.call("me")


async def test_a_broken_tls_connection_is_unreachable(kind: Kind, tmp_path: Path) -> None:
    certificates = certificate(tmp_path)
    trust = ssl.create_default_context(cafile=str(certificates[0]))
    async with (
        sending(b"no record of TLS", beneath=certificates) as port,
        either(kind, f"https://127.0.0.1:{port}", "t", ssl_context=trust, **QUICK) as client,
    ):
        for ask in (client.call("me"), client.stream(QUESTION)):
            with pytest.raises(Unreachable):
                await ask


async def test_a_stream_without_its_last_event_raises_and_unknown_events_are_passed_over(kind: Kind) -> None:
    def stream(_: Request) -> Response:
        parts = [": comment\n\n", "event: progress\ndata: {}\n\n", 'event: delta\ndata: {"text": "a", "new": 1}\n\n']
        return StreamingResponse(iter(parts), media_type="text/event-stream")

    async with replies(stream) as (url, _), either(kind, url, "t", **QUICK) as client:
        with pytest.raises(Unreachable, match="ended before the answer was complete"):
            await client.stream(QUESTION)
        [delta] = await client.stream(QUESTION, at_most=1)
    assert isinstance(delta, DeltaEvent)
    assert delta.text == "a"


async def test_another_authority_than_the_systems_is_trusted_where_it_is_named(kind: Kind, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("server")
    async with served(Starlette(routes=[Route("/v1/me", caller)]), tls=(server.certificate, server.key)) as url:
        trusting = ssl.create_default_context(cafile=str(authority.ca))
        async with either(kind, url, "t", ssl_context=trusting) as client:
            assert (await client.call("me")).principal == "ann"
        async with either(kind, url, "t", **QUICK) as client:
            with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
                await client.call("me")
