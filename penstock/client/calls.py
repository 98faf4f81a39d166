"""The part that both clients share, without I/O: requests, the parsing of responses, and the decision to retry."""

from __future__ import annotations

import random
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlsplit
from uuid import UUID

import httpx
from pydantic import BaseModel, ValidationError
from tenacity import RetryCallState, retry_if_exception, stop_after_attempt

from penstock.client.errors import (
    ClientError,
    InvalidResponse,
    ProblemError,
    TokenUnavailable,
    Unreachable,
    problem,
)
from penstock.client.models import (
    AnswerEvent,
    AnswerResponse,
    CallerResponse,
    CitationEvent,
    ConflictsResponse,
    DeltaEvent,
    DocumentResponse,
    FacetsResponse,
    PipelineResponse,
    PreviewResponse,
    ProposedDocument,
    ReviewResponse,
    SearchFilters,
    SearchResponse,
    SourcesEvent,
    StandingAnswerResponse,
    StandingListResponse,
    StandingResponse,
    StoryResponse,
    Turn,
)
from pipeline.core.publication import DEFAULT_WAIT_SECONDS
from pipeline.core.retry import backoff

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

PersonToken = str | Callable[[], str]
"""A token that names a person, or a function that returns one."""
BASE_SECONDS = 0.5
"""The first wait before sending again is at most this long; each further one may be twice as long."""
REFUSED = frozenset({429, 503})
"""Statuses after which a later attempt may succeed."""
MAX_RESPONSE_BYTES = 64 * 2**20
"""The largest response, when it is decompressed. A document has at most 4 MiB of text, which JSON may write with six
bytes for each."""
FAILURES = (httpx.RequestError, ssl.SSLError)
"""Errors of a connection. The asynchronous client of httpx lets an error of TLS after the handshake through."""
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
EVENTS: Mapping[str, type[BaseModel]] = {
    "sources": SourcesEvent,
    "delta": DeltaEvent,
    "citation": CitationEvent,
    "done": AnswerResponse,
}


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One operation of docs/openapi.json with its arguments."""

    method: str
    path: str
    read: Callable[[bytes], T]
    """Parses the body of a successful response. Raises InvalidResponse."""
    json: Mapping[str, Any] | None = None
    parameters: Mapping[str, str | int] | None = None
    idempotent: bool = True
    """Whether sending it twice has the same effect as sending it once."""

    def may_repeat(self, error: BaseException) -> bool:
        """Whether to send it again after this error. What is not idempotent is sent again only if the service has
        certainly not begun to work on it."""
        match error:
            case ProblemError(status=status):
                return status in REFUSED if self.idempotent else status == 429
            case Unreachable(__cause__=cause):
                return isinstance(cause, NEVER_SENT) or (
                    self.idempotent and not isinstance(cause, httpx.TimeoutException)
                )
        return False


def search(
    query: str,
    top: int,
    mode: str,
    filters: SearchFilters | None,
    rerank: bool,
    sort: str = "relevance",
    cursor: str | None = None,
    facets: Iterable[str] = (),
    at_least: str | None = None,
    wait_seconds: float = DEFAULT_WAIT_SECONDS,
) -> Call[SearchResponse]:
    body = {"query": query, "top": top, "mode": mode, "rerank": rerank, **_filters(filters)}
    body |= _present(cursor=cursor, facets=list(facets) or None, sort=None if sort == "relevance" else sort)
    body |= _published(at_least, wait_seconds)
    return Call("POST", "/v1/search", _reader(SearchResponse), json=body)


def answer(
    question: str,
    mode: str | None,
    documents: Iterable[UUID | str],
    collection: str | None,
    filters: SearchFilters | None,
    top: int | None,
    history: bool,
    turns: Iterable[Turn] = (),
    at_least: str | None = None,
    wait_seconds: float = DEFAULT_WAIT_SECONDS,
    *,
    keep: bool = False,
    stream: bool = False,
) -> Call[AnswerResponse]:
    body = _present(question=question, mode=mode, collection=collection, top=top)
    body |= _published(at_least, wait_seconds)
    body |= {"documents": [str(document) for document in documents], "history": history, "stream": stream}
    said = [turn.model_dump(mode="json", exclude_defaults=True) for turn in turns]
    body |= {"keep": True} if keep else {}  # a service of before refuses the field
    body |= _filters(filters) | ({"turns": said} if said else {})  # a service of before refuses the field
    return Call("POST", "/v1/answers", _reader(AnswerResponse), json=body, idempotent=False)


def _published(at_least: str | None, wait_seconds: float) -> dict[str, Any]:
    return {"at_least": at_least, "wait_seconds": wait_seconds} if at_least is not None else {}


def document(document_id: UUID | str) -> Call[DocumentResponse]:
    return Call("GET", f"/v1/documents/{_segment(document_id)}", _reader(DocumentResponse))


def story(document_id: UUID | str) -> Call[StoryResponse]:
    return Call("GET", f"/v1/documents/{_segment(document_id)}/why", _reader(StoryResponse))


def facets() -> Call[FacetsResponse]:
    return Call("GET", "/v1/facets", _reader(FacetsResponse))


def conflicts(
    state: str,
    kinds: Iterable[str],
    limit: int,
    sources: Iterable[str] = (),
    document: str | None = None,
    cursor: str | None = None,
) -> Call[ConflictsResponse]:
    parameters = _present(
        state=state,
        kind=list(kinds) or None,
        source=list(sources) or None,
        document=document,
        cursor=cursor,
        limit=limit,
    )
    return Call("GET", "/v1/conflicts", _reader(ConflictsResponse), parameters=parameters)


def decide_conflict(conflict_id: UUID | str, decision: str) -> Call[None]:
    """A later decision replaces an earlier one, so that sending it twice does no harm."""
    return Call("POST", f"/v1/conflicts/{_segment(conflict_id)}", _nothing, json={"decision": decision})


def me() -> Call[CallerResponse]:
    return Call("GET", "/v1/me", _reader(CallerResponse))


def preview(source: str, documents: Iterable[ProposedDocument], folders: Iterable[str]) -> Call[PreviewResponse]:
    body = _present(
        source=source,
        documents=[document.model_dump(mode="json", exclude_defaults=True) for document in documents],
        folders=list(folders),
    )
    return Call("POST", "/v1/previews", _reader(PreviewResponse), json=body)


def standing() -> Call[StandingListResponse]:
    return Call("GET", "/v1/standing", _reader(StandingListResponse))


def standing_question(question_id: UUID | str) -> Call[StandingResponse]:
    return Call("GET", f"/v1/standing/{_segment(question_id)}", _reader(StandingResponse))


def ask_standing(question_id: UUID | str) -> Call[StandingAnswerResponse]:
    path = f"/v1/standing/{_segment(question_id)}/answer"
    return Call("POST", path, _reader(StandingAnswerResponse), idempotent=False)


def remove_standing(question_id: UUID | str) -> Call[None]:
    """Not sent twice: the second time there is nothing left to remove."""
    return Call("DELETE", f"/v1/standing/{_segment(question_id)}", _nothing, idempotent=False)


def feedback(
    verdict: str, answer_id: UUID | str | None, chunk_id: UUID | str | None, query: str | None, note: str | None
) -> Call[None]:
    """A later verdict replaces an earlier one, so that sending it twice does no harm."""
    body = _present(verdict=verdict, answer_id=answer_id, chunk_id=chunk_id, query=query, note=note)
    return Call("POST", "/v1/feedback", _nothing, json=body)


def review(limit: int, before: datetime | None) -> Call[ReviewResponse]:
    parameters = _present(limit=limit, before=before.isoformat() if before else None)
    return Call("GET", "/v1/review", _reader(ReviewResponse), parameters=parameters)


def resolve(answer_id: UUID | str, verdict: str) -> Call[None]:
    path = f"/v1/review/{_segment(answer_id)}"
    return Call("POST", path, _nothing, json={"verdict": verdict}, idempotent=False)


def pipeline() -> Call[PipelineResponse]:
    return Call("GET", "/v1/pipeline", _reader(PipelineResponse))


def event(name: str, data: str, headers: Mapping[str, str]) -> AnswerEvent | None:
    """A server-sent event; None: this version does not know it. headers: of the response. Raises ProblemError for
    ``error``."""
    if name == "error":
        raise problem(_reader(_Status)(data).status, headers, data)
    model = EVENTS.get(name)
    return None if model is None else _reader(model)(data)  # type: ignore[return-value]


def failure(response: httpx.Response, body: bytes) -> ClientError:
    """The error of a response without success."""
    if response.status_code >= 400:
        return problem(response.status_code, response.headers, body)
    return InvalidResponse(f"the service responded with status {response.status_code}: check its address")


def add(body: bytearray, part: bytes) -> None:
    """Add a part to the body of a response. Raises InvalidResponse for one that is too large."""
    body += part
    if len(body) > MAX_RESPONSE_BYTES:
        raise InvalidResponse(f"the response is larger than {MAX_RESPONSE_BYTES:,} bytes, which none of Penstock's is")


def unreachable(error: Exception) -> Unreachable:
    """To be raised from ``error``."""
    if isinstance(error, httpx.TimeoutException):
        return Unreachable(f"the service did not respond in time ({type(error).__name__})")
    return Unreachable(f"no complete response from the service: {str(error) or type(error).__name__}")


def interrupted() -> Unreachable:
    return Unreachable("the stream ended before the answer was complete")


def retrying(call: Call[Any], attempts: int, longest_wait_seconds: float) -> dict[str, Any]:
    """Options of tenacity. Waits are random and grow, and are never shorter than the service asks for. A request for
    which the service asks for a longer wait than ``longest_wait_seconds`` is not sent again."""

    def wait(state: RetryCallState) -> float:
        assert state.outcome is not None
        return backoff(
            state.attempt_number - 1,
            base=BASE_SECONDS,
            cap=longest_wait_seconds,
            retry_after=_retry_after(state.outcome.exception()),
            random=random.random(),  # noqa: S311
        )

    def is_worthwhile(error: BaseException) -> bool:
        return call.may_repeat(error) and (_retry_after(error) or 0) <= longest_wait_seconds

    return {
        "retry": retry_if_exception(is_worthwhile),
        "wait": wait,
        "stop": stop_after_attempt(attempts),
        "reraise": True,
    }


def base_url(url: str) -> str:
    """Raises ValueError with one line."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("the address of the service begins with http:// or https://, such as https://search.example")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError("the address of the service has no user, query or fragment")
    return url.rstrip("/")


def sendable(headers: Mapping[str, str]) -> Mapping[str, str]:
    """The headers. Raises ValueError for one that HTTP cannot carry, whose value the library would quote."""
    for name, value in headers.items():
        if not re.fullmatch(r"[!-9;-~]+", name) or not re.fullmatch(r"([!-~]([ \t!-~]*[!-~])?)?", value):
            raise ValueError(f"the header {name!r} cannot be sent: it has a line end or a letter that is not ASCII")
    return headers


def on_behalf_of(person: PersonToken | None) -> Mapping[str, str]:
    """The header that names a person. Raises TokenUnavailable for a token that no header can hold."""
    if person is None:
        return {}
    token = person if isinstance(person, str) else person()
    if not re.fullmatch(r"[!-~]+", token):
        raise TokenUnavailable(
            "the person's token is empty, or holds a space, a line end or a letter that is not ASCII"
        )
    return {"X-Penstock-On-Behalf-Of": token}


def _retry_after(error: BaseException | None) -> float | None:
    return error.retry_after_seconds if isinstance(error, ProblemError) else None


def _reader(model: type[M]) -> Callable[[str | bytes], M]:
    def read(body: str | bytes) -> M:
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            place = "/".join(map(str, first["loc"])) or "the body"
            raise InvalidResponse(f"this is not the response of a Penstock service: {place}: {first['msg']}") from None

    return read


def _nothing(_: bytes) -> None:
    return None


def _present(**fields: Any) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, UUID) else value for name, value in fields.items() if value is not None
    }


def _filters(filters: SearchFilters | None) -> dict[str, Any]:
    return {} if filters is None else {"filters": filters.model_dump(mode="json", exclude_defaults=True)}


def _segment(value: UUID | str) -> str:
    """The value as a segment of a path. Raises ValueError for one that would change the path."""
    if str(value) in ("", ".", ".."):
        raise ValueError(f"{str(value)!r} is no id of a document")
    return quote(str(value), safe="")


class _Status(BaseModel):
    status: int
