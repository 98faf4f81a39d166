"""The clients: thin shells around ``penstock.client.calls``, one with blocking and one with asynchronous methods."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from datetime import datetime
from importlib.metadata import version
from typing import Any, Literal, Self, TypeVar
from uuid import UUID

import httpx
from httpx_sse import EventSource, SSEError
from tenacity import AsyncRetrying, Retrying

from penstock.client import calls
from penstock.client.calls import Call, PersonToken
from penstock.client.errors import InvalidResponse
from penstock.client.models import (
    AnswerEvent,
    AnswerMode,
    AnswerResponse,
    CallerResponse,
    ConflictsResponse,
    DocumentResponse,
    FacetsResponse,
    PipelineResponse,
    PreviewResponse,
    ProposedDocument,
    ReviewResponse,
    SearchFilters,
    SearchMode,
    SearchResponse,
    SearchSort,
    StandingAnswerResponse,
    StandingListResponse,
    StandingResponse,
    StoryResponse,
    Turn,
)
from penstock.client.token import AsyncToken, BearerToken, Token
from pipeline.core.publication import DEFAULT_WAIT_SECONDS

T = TypeVar("T")

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 3.0
"""The service closes an idle connection after five seconds. A request on a connection that is being closed would
fail."""


def _options(
    url: str,
    token: AsyncToken | None,
    timeout_seconds: float,
    headers: Mapping[str, str] | None,
    ssl_context: ssl.SSLContext | None,
    connections: int,
) -> dict[str, Any]:
    """Options of httpx's clients."""
    return {
        "base_url": calls.base_url(url),
        "auth": None if token is None else BearerToken(token),
        "timeout": httpx.Timeout(timeout_seconds, connect=min(CONNECT_SECONDS, timeout_seconds), pool=None),
        "headers": {"User-Agent": f"penstock-client/{version('penstock')}", **calls.sendable(headers or {})},
        "limits": httpx.Limits(max_connections=connections, keepalive_expiry=KEEPALIVE_SECONDS),
        "verify": True if ssl_context is None else ssl_context,
    }


class Client:
    """The query service, with blocking methods. It may be used by several threads, and is closed by ``close()`` or as a
    context manager.

    url: the address of the service. token: a token or API key, a file that contains one, or a function that returns
    one. timeout_seconds: the longest time for which the service may be silent. attempts: how often a request is sent
    if the service does not respond, or responds with 429 or 503. Waits grow, and are as long as the service asks for;
    if it asks for more than longest_wait_seconds, the error is raised at once. connections: how many requests are
    under way at once; others wait for them. The service refuses more than 8 of one caller, unless it is configured
    otherwise. headers: further headers of each request. ssl_context: trusts other authorities than the system's, or
    holds the client's certificate. Proxies are those of the environment (``HTTPS_PROXY``, ``NO_PROXY``).

    All methods raise ProblemError (the service responded with an error), Unreachable (it did not respond),
    InvalidResponse (the response is not Penstock's) and TokenUnavailable (also for a token that no header can hold);
    all are ClientError. An exception of the function that returns the token is raised as it is.
    """

    def __init__(
        self,
        url: str,
        token: Token | None = None,
        *,
        timeout_seconds: float = 60.0,
        attempts: int = 4,
        longest_wait_seconds: float = 60.0,
        connections: int = 8,
        headers: Mapping[str, str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Raises ValueError if the address is not one of HTTP, a header cannot be sent, or the token is the name of a
        file. Connects at the first request."""
        self._http = httpx.Client(**_options(url, token, timeout_seconds, headers, ssl_context, connections))
        self._attempts, self._longest_wait_seconds = attempts, longest_wait_seconds
        self._person: PersonToken | None = None

    def on_behalf_of(self, person: PersonToken) -> Self:
        """A client for requests on behalf of a person, which shares this one's credential, connections and settings;
        closing either closes both. person: a token that names the person and is signed by the issuer that vouches for
        the people of this service (docs/http.md), or a function that returns one, which is called for each request,
        because such tokens are valid for a few minutes."""
        other = copy(self)
        other._person = person
        return other

    def search(
        self,
        query: str,
        *,
        top: int = 10,
        mode: SearchMode = "hybrid",
        filters: SearchFilters | None = None,
        rerank: bool = True,
        sort: SearchSort = "relevance",
        cursor: str | None = None,
        facets: Iterable[str] = (),
        at_least: str | None = None,
        wait_seconds: float = DEFAULT_WAIT_SECONDS,
    ) -> SearchResponse:
        """The most relevant passages that the caller may read, at most ``top`` (1 to 100), the best first. mode:
        ``hybrid`` searches both stores, ``vector`` and ``keyword`` one. rerank: if the service has a reranker. sort:
        ``newest`` and ``oldest`` need keyword search. cursor: that of the previous response, for the next page of the
        same search. facets: declared keys whose values are counted. at_least: the token of a publication; the service
        waits until the caller can see its changes, at most wait_seconds (0 to 30; 10 by default)."""
        return self._send(calls.search(query, top, mode, filters, rerank, sort, cursor, facets, at_least, wait_seconds))

    def answer(
        self,
        question: str,
        *,
        mode: AnswerMode | None = None,
        documents: Iterable[UUID | str] = (),
        collection: str | None = None,
        filters: SearchFilters | None = None,
        top: int | None = None,
        history: bool = False,
        turns: Iterable[Turn] = (),
        at_least: str | None = None,
        wait_seconds: float = DEFAULT_WAIT_SECONDS,
        keep: bool = False,
    ) -> AnswerResponse:
        """An answer from passages that the caller may read, with a citation for each claim.

        mode: by default the service chooses one. documents: answer from the whole text of these (at most 100).
        collection: answer from this source only. top: number of passages (1 to 50). history: also use the caller's own
        conversations. turns: the conversation so far, which the question may refer to (at most 10). at_least and
        wait_seconds: as for ``search``. keep: store it as a standing question, with the response's ``standing_id``.
        It is sent again only if the service has not begun to work on it.
        """
        return self._send(
            calls.answer(
                question, mode, documents, collection, filters, top, history, turns, at_least, wait_seconds, keep=keep
            )
        )

    @contextmanager
    def stream_answer(
        self,
        question: str,
        *,
        mode: AnswerMode | None = None,
        documents: Iterable[UUID | str] = (),
        collection: str | None = None,
        filters: SearchFilters | None = None,
        top: int | None = None,
        history: bool = False,
        turns: Iterable[Turn] = (),
        at_least: str | None = None,
        wait_seconds: float = DEFAULT_WAIT_SECONDS,
        keep: bool = False,
    ) -> Iterator[Iterator[AnswerEvent]]:
        """An answer while it is written; the arguments are those of ``answer``.

        A context manager that yields events: one SourcesEvent, then DeltaEvent and CitationEvent, and at last the
        AnswerResponse, which alone was checked. Leaving it closes the connection, which stops the model. Iterating
        raises ProblemError or Unreachable if the answer cannot be completed.
        """
        call = calls.answer(
            question,
            mode,
            documents,
            collection,
            filters,
            top,
            history,
            turns,
            at_least,
            wait_seconds,
            keep=keep,
            stream=True,
        )
        response = self._again(call)(self._open, call)
        events = self._events(response)
        try:
            yield events
        finally:
            events.close()
            response.close()

    def document(self, document_id: UUID | str) -> DocumentResponse:
        """A document with its whole text. Raises ProblemError with status 404 if it does not exist or the caller may
        not read it."""
        return self._send(calls.document(document_id))

    def story(self, document_id: UUID | str) -> StoryResponse:
        """The processing history of a document, and whether it can be found. Raises as ``document`` does."""
        return self._send(calls.story(document_id))

    def facets(self) -> FacetsResponse:
        """Values for filters, from the documents that the caller may read."""
        return self._send(calls.facets())

    def preview(
        self, source: str, documents: Iterable[ProposedDocument], folders: Iterable[str] = ()
    ) -> PreviewResponse:
        """The answers that a proposed edit of a source would change. It takes up to two minutes, so that the client
        needs as much time (``timeout_seconds``). folders: those that ``documents`` lists completely; other documents
        below them are deleted."""
        return self._send(calls.preview(source, documents, folders))

    def conflicts(
        self,
        *,
        state: Literal["open", "dismissed", "accepted"] = "open",
        kinds: Iterable[str] = (),
        sources: Iterable[str] = (),
        document: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ConflictsResponse:
        """Passages that contradict or repeat each other, the newest first: those of which the caller may read both.
        kinds: only these. sources, document: only those with a document of such a source, or with this document, by
        id or external id. cursor: that of the previous page. limit: at most 200."""
        return self._send(calls.conflicts(state, kinds, limit, sources, document, cursor))

    def decide_conflict(self, conflict_id: UUID | str, decision: Literal["dismissed", "accepted", "open"]) -> None:
        """Dismiss or accept a conflict, or open it again, for everybody. Raises ProblemError with status 404 if there
        is none of which the caller may read both passages."""
        return self._send(calls.decide_conflict(conflict_id, decision))

    def me(self) -> CallerResponse:
        """The authenticated caller."""
        return self._send(calls.me())

    def standing(self) -> StandingListResponse:
        """The caller's standing questions, the newest first, each with what has changed since its answer."""
        return self._send(calls.standing())

    def standing_question(self, question_id: UUID | str) -> StandingResponse:
        """A standing question with its stored answer, without the sentences that the caller may no longer see. Raises
        ProblemError with status 404 if the caller has no such question."""
        return self._send(calls.standing_question(question_id))

    def ask_standing(self, question_id: UUID | str) -> StandingAnswerResponse:
        """Ask a standing question again. The answer replaces the stored one; ``difference`` compares them. Raises as
        ``standing_question`` does."""
        return self._send(calls.ask_standing(question_id))

    def remove_standing(self, question_id: UUID | str) -> None:
        """Remove a standing question. Raises as ``standing_question`` does."""
        return self._send(calls.remove_standing(question_id))

    def feedback(
        self,
        verdict: Literal["up", "down"],
        *,
        answer_id: UUID | str | None = None,
        chunk_id: UUID | str | None = None,
        query: str | None = None,
        note: str | None = None,
    ) -> None:
        """Rate an answer (``answer_id``), or a passage (``chunk_id``) together with the ``query`` that returned it. A
        later verdict replaces an earlier one. note: at most 2,000 characters. The service discards feedback about what
        the caller was not shown, without an error."""
        return self._send(calls.feedback(verdict, answer_id, chunk_id, query, note))

    def review(self, *, limit: int = 50, before: datetime | None = None) -> ReviewResponse:
        """For operators: answers of their tenant that a person should review, the newest first. before: the last
        ``asked_at`` of the previous page."""
        return self._send(calls.review(limit, before))

    def resolve(self, answer_id: UUID | str, verdict: Literal["right", "wrong"]) -> None:
        """For operators: remove a reviewed answer from the queue. Raises ProblemError with status 404 if it is not
        there."""
        return self._send(calls.resolve(answer_id, verdict))

    def pipeline(self) -> PipelineResponse:
        """For operators: the state of the pipeline, for all tenants."""
        return self._send(calls.pipeline())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _again(self, call: Call[Any]) -> Retrying:
        return Retrying(**calls.retrying(call, self._attempts, self._longest_wait_seconds))

    def _send(self, call: Call[T]) -> T:
        result: T = self._again(call)(self._send_once, call)
        return result

    def _send_once(self, call: Call[T]) -> T:
        response = self._open(call)
        try:
            return call.read(_body(response))
        except calls.FAILURES as error:
            raise calls.unreachable(error) from error
        finally:
            response.close()

    def _open(self, call: Call[Any]) -> httpx.Response:
        """A successful response, whose body is not read."""
        headers = calls.on_behalf_of(self._person)
        request = self._http.build_request(
            call.method, call.path, json=call.json, params=call.parameters, headers=headers
        )
        try:
            response = self._http.send(request, stream=True)
            if response.is_success:
                return response
            try:
                body = _body(response)
            finally:
                response.close()
        except calls.FAILURES as error:
            raise calls.unreachable(error) from error
        raise calls.failure(response, body)

    def _events(self, response: httpx.Response) -> Generator[AnswerEvent, None, None]:
        try:
            for sent in EventSource(response).iter_sse():
                event = calls.event(sent.event, sent.data, response.headers)
                if event is not None:
                    yield event
                if isinstance(event, AnswerResponse):
                    return
        except SSEError as error:
            raise InvalidResponse("the service did not respond with a stream of events") from error
        except calls.FAILURES as error:
            raise calls.unreachable(error) from error
        raise calls.interrupted()


class AsyncClient:
    """The query service, with asynchronous methods: those of ``Client``, with the same arguments and errors. It belongs
    to one event loop, and is closed by ``aclose()`` or as a context manager.

    token: as for ``Client``, or an asynchronous function. Others are called in the event loop.
    """

    def __init__(
        self,
        url: str,
        token: AsyncToken | None = None,
        *,
        timeout_seconds: float = 60.0,
        attempts: int = 4,
        longest_wait_seconds: float = 60.0,
        connections: int = 8,
        headers: Mapping[str, str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Raises ValueError if the address is not one of HTTP, a header cannot be sent, or the token is the name of a
        file. Connects at the first request."""
        self._http = httpx.AsyncClient(**_options(url, token, timeout_seconds, headers, ssl_context, connections))
        self._attempts, self._longest_wait_seconds = attempts, longest_wait_seconds
        self._person: PersonToken | None = None

    def on_behalf_of(self, person: PersonToken) -> Self:
        """A client for requests on behalf of a person, which shares this one's credential, connections and settings;
        closing either closes both. person: a token that names the person and is signed by the issuer that vouches for
        the people of this service (docs/http.md), or a function that returns one, which is called for each request,
        because such tokens are valid for a few minutes."""
        other = copy(self)
        other._person = person
        return other

    async def search(
        self,
        query: str,
        *,
        top: int = 10,
        mode: SearchMode = "hybrid",
        filters: SearchFilters | None = None,
        rerank: bool = True,
        sort: SearchSort = "relevance",
        cursor: str | None = None,
        facets: Iterable[str] = (),
        at_least: str | None = None,
        wait_seconds: float = DEFAULT_WAIT_SECONDS,
    ) -> SearchResponse:
        """As ``Client.search``."""
        return await self._send(
            calls.search(query, top, mode, filters, rerank, sort, cursor, facets, at_least, wait_seconds)
        )

    async def answer(
        self,
        question: str,
        *,
        mode: AnswerMode | None = None,
        documents: Iterable[UUID | str] = (),
        collection: str | None = None,
        filters: SearchFilters | None = None,
        top: int | None = None,
        history: bool = False,
        turns: Iterable[Turn] = (),
        at_least: str | None = None,
        wait_seconds: float = DEFAULT_WAIT_SECONDS,
        keep: bool = False,
    ) -> AnswerResponse:
        """As ``Client.answer``."""
        return await self._send(
            calls.answer(
                question, mode, documents, collection, filters, top, history, turns, at_least, wait_seconds, keep=keep
            )
        )

    @asynccontextmanager
    async def stream_answer(
        self,
        question: str,
        *,
        mode: AnswerMode | None = None,
        documents: Iterable[UUID | str] = (),
        collection: str | None = None,
        filters: SearchFilters | None = None,
        top: int | None = None,
        history: bool = False,
        turns: Iterable[Turn] = (),
        at_least: str | None = None,
        wait_seconds: float = DEFAULT_WAIT_SECONDS,
        keep: bool = False,
    ) -> AsyncIterator[AsyncIterator[AnswerEvent]]:
        """As ``Client.stream_answer``."""
        call = calls.answer(
            question,
            mode,
            documents,
            collection,
            filters,
            top,
            history,
            turns,
            at_least,
            wait_seconds,
            keep=keep,
            stream=True,
        )
        response: httpx.Response = await self._again(call)(self._open, call)
        events = self._events(response)
        try:
            yield events
        finally:
            await events.aclose()
            await response.aclose()

    async def document(self, document_id: UUID | str) -> DocumentResponse:
        """As ``Client.document``."""
        return await self._send(calls.document(document_id))

    async def story(self, document_id: UUID | str) -> StoryResponse:
        """As ``Client.story``."""
        return await self._send(calls.story(document_id))

    async def facets(self) -> FacetsResponse:
        """As ``Client.facets``."""
        return await self._send(calls.facets())

    async def preview(
        self, source: str, documents: Iterable[ProposedDocument], folders: Iterable[str] = ()
    ) -> PreviewResponse:
        """As ``Client.preview``."""
        return await self._send(calls.preview(source, documents, folders))

    async def conflicts(
        self,
        *,
        state: Literal["open", "dismissed", "accepted"] = "open",
        kinds: Iterable[str] = (),
        sources: Iterable[str] = (),
        document: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> ConflictsResponse:
        """As ``Client.conflicts``."""
        return await self._send(calls.conflicts(state, kinds, limit, sources, document, cursor))

    async def decide_conflict(
        self, conflict_id: UUID | str, decision: Literal["dismissed", "accepted", "open"]
    ) -> None:
        """As ``Client.decide_conflict``."""
        return await self._send(calls.decide_conflict(conflict_id, decision))

    async def me(self) -> CallerResponse:
        """As ``Client.me``."""
        return await self._send(calls.me())

    async def standing(self) -> StandingListResponse:
        """As ``Client.standing``."""
        return await self._send(calls.standing())

    async def standing_question(self, question_id: UUID | str) -> StandingResponse:
        """As ``Client.standing_question``."""
        return await self._send(calls.standing_question(question_id))

    async def ask_standing(self, question_id: UUID | str) -> StandingAnswerResponse:
        """As ``Client.ask_standing``."""
        return await self._send(calls.ask_standing(question_id))

    async def remove_standing(self, question_id: UUID | str) -> None:
        """As ``Client.remove_standing``."""
        return await self._send(calls.remove_standing(question_id))

    async def feedback(
        self,
        verdict: Literal["up", "down"],
        *,
        answer_id: UUID | str | None = None,
        chunk_id: UUID | str | None = None,
        query: str | None = None,
        note: str | None = None,
    ) -> None:
        """As ``Client.feedback``."""
        return await self._send(calls.feedback(verdict, answer_id, chunk_id, query, note))

    async def review(self, *, limit: int = 50, before: datetime | None = None) -> ReviewResponse:
        """As ``Client.review``."""
        return await self._send(calls.review(limit, before))

    async def resolve(self, answer_id: UUID | str, verdict: Literal["right", "wrong"]) -> None:
        """As ``Client.resolve``."""
        return await self._send(calls.resolve(answer_id, verdict))

    async def pipeline(self) -> PipelineResponse:
        """As ``Client.pipeline``."""
        return await self._send(calls.pipeline())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _again(self, call: Call[Any]) -> AsyncRetrying:
        return AsyncRetrying(**calls.retrying(call, self._attempts, self._longest_wait_seconds))

    async def _send(self, call: Call[T]) -> T:
        result: T = await self._again(call)(self._send_once, call)
        return result

    async def _send_once(self, call: Call[T]) -> T:
        response = await self._open(call)
        try:
            return call.read(await _abody(response))
        except calls.FAILURES as error:
            raise calls.unreachable(error) from error
        finally:
            await response.aclose()

    async def _open(self, call: Call[Any]) -> httpx.Response:
        """A successful response, whose body is not read."""
        headers = calls.on_behalf_of(self._person)
        request = self._http.build_request(
            call.method, call.path, json=call.json, params=call.parameters, headers=headers
        )
        try:
            response = await self._http.send(request, stream=True)
            if response.is_success:
                return response
            try:
                body = await _abody(response)
            finally:
                await response.aclose()
        except calls.FAILURES as error:
            raise calls.unreachable(error) from error
        raise calls.failure(response, body)

    async def _events(self, response: httpx.Response) -> AsyncGenerator[AnswerEvent, None]:
        try:
            async for sent in EventSource(response).aiter_sse():
                event = calls.event(sent.event, sent.data, response.headers)
                if event is not None:
                    yield event
                if isinstance(event, AnswerResponse):
                    return
        except SSEError as error:
            raise InvalidResponse("the service did not respond with a stream of events") from error
        except calls.FAILURES as error:
            raise calls.unreachable(error) from error
        raise calls.interrupted()


def _body(response: httpx.Response) -> bytes:
    """Raises InvalidResponse for one that is too large."""
    body = bytearray()
    for part in response.iter_bytes():
        calls.add(body, part)
    return bytes(body)


async def _abody(response: httpx.Response) -> bytes:
    """As ``_body``."""
    body = bytearray()
    async for part in response.aiter_bytes():
        calls.add(body, part)
    return bytes(body)
