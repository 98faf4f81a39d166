"""Clients retry after some errors, wait as the service asks, and read its errors."""

from __future__ import annotations

import pickle
from uuid import UUID

import httpx
import pytest
from tenacity import Retrying

from penstock.client import AnswerResponse, InvalidResponse, ProblemError, Turn, Unreachable, calls
from penstock.client.errors import problem

READ, ANSWER = calls.me(), calls.answer("q", None, (), None, None, None, False)


def test_turns_are_sent_with_their_ids_and_only_where_there_are_any() -> None:
    """A service of before knows no turns."""
    id_ = UUID(int=7)
    response = AnswerResponse(
        answer="At six [1].",
        citations=[],
        steps=[],
        grounded=True,
        mode="hybrid",
        notes=[],
        relevant=True,
        model=None,
        unsupported=[],
        review=False,
        answer_id=str(id_),
    )
    turns = [response.turn("When does it open?"), Turn(question="And close?")]
    body = calls.answer("Why?", None, (), None, None, None, False, turns).json
    assert body is not None
    assert body["turns"] == [
        {"question": "When does it open?", "answer": "At six [1].", "answer_id": str(id_)},
        {"question": "And close?"},
    ]
    assert ANSWER.json is not None
    assert "turns" not in ANSWER.json


def refused(status: int, **headers: str) -> ProblemError:
    return problem(status, httpx.Headers(headers), b"")


def unreachable(cause: httpx.RequestError) -> Unreachable:
    try:
        raise calls.unreachable(cause) from cause
    except Unreachable as error:
        return error


@pytest.mark.parametrize(
    ("error", "read", "answer"),
    [
        (refused(429), True, True),  # refused before it was worked on
        (refused(503), True, False),
        (refused(500), False, False),
        (refused(404), False, False),
        (unreachable(httpx.ConnectError("refused")), True, True),
        (unreachable(httpx.ConnectTimeout("late")), True, True),
        (unreachable(httpx.RemoteProtocolError("closed")), True, False),
        (unreachable(httpx.ReadError("cut")), True, False),
        (unreachable(httpx.ReadTimeout("silent")), False, False),  # its time is used up
        (InvalidResponse("a page"), False, False),
        (KeyError("of the function that returns the token"), False, False),
    ],
)
def test_only_what_cannot_have_an_effect_twice_is_sent_again(error: Exception, read: bool, answer: bool) -> None:
    assert (READ.may_repeat(error), ANSWER.may_repeat(error)) == (read, answer)


def attempts(error: Exception, longest: float = 0.0) -> int:
    """How often a request is sent that always fails so. No wait is longer than ``longest``."""
    made = []

    def fail() -> None:
        made.append(1)
        raise error

    with pytest.raises(type(error)):
        Retrying(**calls.retrying(READ, 4, longest), sleep=lambda _: None)(fail)
    return len(made)


def test_a_request_is_sent_at_most_as_often_as_configured() -> None:
    assert attempts(refused(503)) == 4
    assert attempts(refused(404)) == 1


def test_a_wait_that_is_too_long_is_not_begun() -> None:
    """An exhausted budget of the day asks for hours."""
    assert attempts(refused(429, **{"Retry-After": "31"}), longest=30) == 1
    assert attempts(refused(429, **{"Retry-After": "30"}), longest=30) == 4


def test_waits_are_as_long_as_the_service_asks_for() -> None:
    waits: list[float] = []

    def fail() -> None:
        raise refused(503, **{"Retry-After": "7"})

    with pytest.raises(ProblemError):
        Retrying(**calls.retrying(READ, 3, 30), sleep=waits.append)(fail)
    assert len(waits) == 2
    assert all(7 <= wait <= 7 + calls.BASE_SECONDS for wait in waits)


@pytest.mark.parametrize(
    "body",
    [
        b'{"type": 1, "errors": 5}',
        b'{"type": "x", "errors": true}',
        b'{"type": [], "title": {}, "detail": [], "errors": {"a": 1}}',
        b'{"type": "x", "errors": [1, {"pointer": 2}]}',
        b"[" * 100_000,
        b"1" * 5_000,
        b'{"type": "x", "title": "\\u001b]0;x\\u0007\\n", "detail": "' + b"long" * 100_000 + b'"}',
    ],
)
def test_any_body_of_an_error_is_read_as_one_short_line(body: bytes) -> None:
    error = problem(502, httpx.Headers({b"request-id": b"\x9b2J"}), body)
    assert error.status == 502
    assert str(error).isprintable()
    assert len(str(error)) < 5_000


@pytest.mark.parametrize("url", ["https://u:secret@host", "https://:secret@host", "https://u@host", "https://@host"])
def test_an_address_with_a_login_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ValueError, match="has no user") as raised:
        calls.base_url(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "headers", [{"X-A": "secret\n"}, {"X-A": "secret\r\nX: 1"}, {"X-A": " secret"}, {"X A": "secret"}]
)
def test_a_header_that_cannot_be_sent_is_refused_without_being_quoted(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be sent") as raised:
        calls.sendable(headers)
    assert "secret" not in str(raised.value)
    assert calls.sendable({"X-A": "a b", "X-B": ""})


def test_an_error_of_the_service_has_all_its_parts() -> None:
    body = (
        b'{"type": "urn:penstock:problem:invalid", "title": "Invalid request", "status": 422,'
        b' "detail": "/top: too many", "errors": [{"pointer": "/top", "detail": "too many"}]}'
    )
    error = problem(422, httpx.Headers({"Request-Id": "r1", "Trace-Id": "t1", "Retry-After": "3"}), body)
    assert (error.status, error.kind, error.title, error.detail) == (
        422,
        "invalid",
        "Invalid request",
        "/top: too many",
    )
    assert [(field.pointer, field.detail) for field in error.errors] == [("/top", "too many")]
    assert (error.request_id, error.trace_id, error.retry_after_seconds) == ("r1", "t1", 3)
    assert str(error) == "422 Invalid request: /top: too many (request r1)"


def test_an_error_of_the_service_can_be_raised_in_another_process() -> None:
    """The pool of processes broke instead."""
    error = refused(503, **{"Retry-After": "3", "Request-Id": "r1"})
    error.add_note("while reading the handbook")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.status, copy.retry_after_seconds) == (str(error), 503, 3)


@pytest.mark.parametrize("body", [b"<html>Bad gateway</html>", b"", b"[]", b"\xff", b'{"error": "no"}'])
def test_an_error_of_another_server_says_so(body: bytes) -> None:
    error = problem(502, httpx.Headers(), body)
    assert (error.type, error.kind, error.status) == ("about:blank", "", 502)
    assert str(error).startswith("502 Bad Gateway: this is not a response of Penstock: check the address")


def test_a_response_that_is_not_penstocks_is_named_without_its_content() -> None:
    for body in (b"<html>secret</html>", b'{"tenant": {"secret": 1}}', b"null"):
        with pytest.raises(InvalidResponse, match="not the response of a Penstock service") as raised:
            READ.read(body)
        assert "secret" not in str(raised.value)
        assert "\n" not in str(raised.value)


def test_an_id_cannot_leave_its_place_in_the_path() -> None:
    assert calls.document("../me?x=1").path == "/v1/documents/..%2Fme%3Fx%3D1"
    assert calls.story(UUID(int=1)).path == "/v1/documents/00000000-0000-0000-0000-000000000001/why"
    for name in ("", ".", ".."):  # which HTTP libraries resolve
        with pytest.raises(ValueError, match="is no id of a document"):
            calls.document(name)


@pytest.mark.parametrize(
    "url", ["search.example", "127.0.0.1:8080", "ftp://x", "http://", "http://u:p@x", "http://x?y"]
)
def test_an_address_that_is_none_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="the address of the service"):
        calls.base_url(url)


def test_a_service_may_be_below_a_path() -> None:
    assert calls.base_url("https://example.org/search/") == "https://example.org/search"
