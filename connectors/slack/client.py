"""Slack's Web API (one call, all pages of a list, the meaning of its errors) and Socket Mode.

docs.slack.dev/apis/web-api: every response is 200 with ``ok``; limits count each method by itself.

docs.slack.dev/apis/events-api/using-socket-mode: events arrive over a websocket that we open, so that no public address
is needed. The library's client maintains the connection. Its log messages may hold the address with its ticket, so none
of them is logged.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping
from typing import Any

import httpx
import structlog
from pydantic import SecretStr
from slack_sdk.socket_mode.aiohttp import SocketModeClient
from slack_sdk.socket_mode.async_client import AsyncBaseSocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.socket_mode.response import SocketModeResponse

from connectors.web import Denied, Missing, Rejected, TooLarge, Web
from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Retryable

Object = dict[str, Any]

_ABSENT = frozenset(
    {
        "channel_not_found",
        "not_in_channel",
        "thread_not_found",
        "message_not_found",
        "user_not_found",
        "is_archived",
    }
)
_THROTTLED = frozenset({"ratelimited", "rate_limited"})
_NEEDS_A_PERSON = frozenset(
    {
        "invalid_auth",
        "not_authed",
        "account_inactive",
        "token_revoked",
        "token_expired",
        "no_permission",
        "not_allowed_token_type",
        "missing_scope",
        "org_login_required",
        "ekm_access_denied",
        "access_denied",
        "accesslimited",
        "team_access_not_granted",
        "enterprise_is_restricted",
        "unknown_method",
        "invalid_arguments",
    }
)
_CODE = re.compile(r"[a-z0-9_]{1,64}")
_ATTEMPTS = 3
"""Listings begun again because a cursor was no longer known."""


class Absent(PenstockError):
    """There is no such channel or message, or the app may not see it."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class ScopeMissing(Misconfigured):
    def __init__(self, message: str, *, needed: Collection[str], provided: Collection[str]) -> None:
        super().__init__(message)
        self.needed = needed
        self.provided = provided


class InvalidCursor(PenstockError):
    """Slack does not know the cursor (any more): the listing begins again."""


def failure(name: str, method: str, answer: Mapping[str, Any]) -> PenstockError:
    """What an answer with ``ok: false`` means. Quotes nothing of it but the error's own name and scopes."""
    error = answer.get("error")
    code = error if isinstance(error, str) and _CODE.fullmatch(error) else "unknown_error"
    said = f"{name}: Slack answered {code} to {method}"
    if code == "missing_scope":
        needed, provided = _scopes(answer.get("needed")), _scopes(answer.get("provided"))
        which = " or ".join(needed) or "(Slack does not say which)"
        return ScopeMissing(
            f"{said}: add the scope {which} to the app and install it again",
            needed=needed,
            provided=provided,
        )
    if code == "invalid_cursor":
        return InvalidCursor(said)
    if code in _ABSENT:
        return Absent(said, code=code)
    if code in _THROTTLED:
        return Deferred(f"{said}: too many requests")
    if code in _NEEDS_A_PERSON:
        return Misconfigured(f"{said}: check the app's token, its scopes and that it is installed in the workspace")
    return Retryable(said)


def _scopes(text: object) -> tuple[str, ...]:
    names = text.split(",") if isinstance(text, str) else ()
    return tuple(name for name in (part.strip() for part in names) if re.fullmatch(r"[a-z._:]{1,64}", name))


class Bearer(httpx.Auth):
    """The token, and the scopes that Slack says it has (``x-oauth-scopes`` of every answer)."""

    def __init__(self, token: SecretStr) -> None:
        self._token = token
        self.scopes: frozenset[str] | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = f"Bearer {self._token.get_secret_value()}"
        response = yield request
        if (scopes := response.headers.get("x-oauth-scopes")) is not None:
            self.scopes = frozenset(_scopes(scopes))


class Api:
    """Every method raises Deferred, Retryable, Misconfigured (ScopeMissing) and Absent."""

    def __init__(self, base_url: str, token: SecretStr, *, name: str, rows: int) -> None:
        """rows: of one answer of a list."""
        self.name = name
        self._rows = rows
        self._bearer = Bearer(_sendable(token, name))
        self._web = Web(base_url, auth=self._bearer, name=name)

    @property
    def scopes(self) -> frozenset[str] | None:
        """Of the token, once Slack has answered."""
        return self._bearer.scopes

    async def close(self) -> None:
        await self._web.close()

    async def call(self, method: str, **arguments: str | int | bool | None) -> Object:
        """The answer, when it is ok. Raises InvalidCursor besides."""
        form = {
            key: str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in arguments.items()
            if value is not None
        }
        try:
            answer = await self._web.json("POST", method, data=form, bucket=method)
        except TooLarge as error:
            limit = arguments.get("limit")
            if isinstance(limit, int) and limit > 1:  # fewer at once
                return await self.call(method, **{**arguments, "limit": limit // 2})
            raise Retryable(
                f"{self.name}: what Slack answers to {method} is larger than {error.limit} bytes"
            ) from error
        except (Denied, Missing) as error:
            raise Misconfigured(f"{self.name}: {method} is not answered ({error.status}): check base_url") from error
        except Rejected as error:
            raise Retryable(f"{self.name}: Slack answered {error.status} to {method}") from error
        if not isinstance(answer, dict):
            raise Retryable(f"{self.name}: what answers {method} is not Slack: no JSON object")
        if answer.get("ok") is not True:
            raise failure(self.name, method, answer)
        return answer

    async def everything(self, method: str, field: str, **arguments: str | int | bool | None) -> list[Any]:
        """All pages of a list, in Slack's order; a cursor that expires begins the list again."""
        for _ in range(_ATTEMPTS):
            try:
                return await self._pages(method, field, arguments)
            except InvalidCursor as error:
                expired = error
        raise Retryable(f"{self.name}: Slack forgets the cursors of {method} faster than they can be used") from expired

    async def _pages(self, method: str, field: str, arguments: Mapping[str, str | int | bool | None]) -> list[Any]:
        rows: list[Any] = []
        cursor: str | None = None
        while True:
            answer = await self.call(method, **arguments, limit=self._rows, cursor=cursor)
            rows += listed(answer, field, f"{self.name}: {method}")
            metadata = answer.get("response_metadata")
            after = metadata.get("next_cursor") if isinstance(metadata, dict) else None
            if not after:
                if answer.get("has_more") is True:
                    raise Retryable(f"{self.name}: {method} says that there is more, and not where")
                return rows
            if after == cursor:
                raise Retryable(f"{self.name}: {method} gives the same cursor again and again")
            cursor = after

    async def history(
        self, channel: str, *, limit: int, latest: str | None = None, oldest: str | None = None
    ) -> tuple[list[Object], str | None]:
        """Messages before ``latest``, newest first, parents and broadcasts only, and the next ``latest`` (None: there
        are no more). Pages by time, not by cursor: a ts never expires, so that a crawl resumes after any pause."""
        answer = await self.call(
            "conversations.history", channel=channel, limit=limit, latest=latest, oldest=oldest, inclusive=False
        )
        messages = [
            row for row in listed(answer, "messages", f"{self.name}: conversations.history") if _is_message(row)
        ]
        if answer.get("has_more") is not True:
            return messages, None
        if not messages:
            raise Retryable(f"{self.name}: conversations.history says that there is more, and gives nothing")
        return messages, min((str(row["ts"]) for row in messages), key=float)

    async def thread(self, channel: str, ts: str) -> list[Object]:
        """A parent and its answers, oldest first, each once."""
        rows = await self.everything("conversations.replies", "messages", channel=channel, ts=ts)
        found = {str(row["ts"]): row for row in rows if _is_message(row)}
        return [found[ts] for ts in sorted(found, key=float)]


def listed(answer: Mapping[str, Any], field: str, where: str) -> list[Any]:
    rows = answer.get(field)
    if not isinstance(rows, list):
        raise Retryable(f"{where} answered without {field}")
    return rows


def _is_message(row: object) -> bool:
    return isinstance(row, dict) and isinstance(row.get("ts"), str) and re.fullmatch(r"\d+\.\d+", row["ts"]) is not None


def _sendable(token: SecretStr, name: str) -> SecretStr:
    text = token.get_secret_value().strip()
    if not text or not text.isascii() or not text.isprintable():
        raise Misconfigured(f"{name}: the token is empty or holds letters that no token has: copy it again")
    return SecretStr(text)


PING_SECONDS = 5.0
log = structlog.get_logger()

_silent = logging.getLogger(f"{__name__}.client")
_silent.propagate = False
_silent.disabled = True


class _Client(SocketModeClient):
    """Takes its addresses by our HTTP client, which knows the limits and the errors, and whose proxy is none."""

    def __init__(self, open_connection: Callable[[], Awaitable[str]]) -> None:
        super().__init__(app_token="", logger=_silent, ping_interval=PING_SECONDS)
        self.proxy = None
        self._open_connection = open_connection

    async def issue_new_wss_url(self) -> str:
        return await self._open_connection()


async def listen(
    api: Api, react: Callable[[Mapping[str, Any]], Awaitable[None]], connected: Callable[[], Awaitable[None]]
) -> None:
    """Until cancelled. react: given each envelope's payload, once it is acknowledged. connected: called when a
    connection stands; what happened while there was none may be lost. Raises Misconfigured when the token is refused,
    and what ``react`` and ``connected`` raise."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open_connection() -> str:
        while True:
            try:
                return str((await api.call("apps.connections.open"))["url"])
            except Deferred as error:
                await asyncio.sleep(error.retry_after or 30.0)
            except Retryable as error:
                log.warning("slack_socket_waits", source=api.name, error=str(error))
                await asyncio.sleep(error.retry_after or PING_SECONDS)
            except Misconfigured as error:
                _end(ended, error)
                raise

    async def on_request(client: AsyncBaseSocketModeClient, request: SocketModeRequest) -> None:
        await client.send_socket_mode_response(SocketModeResponse(envelope_id=request.envelope_id))
        if request.type != "events_api":
            return
        await guarded(react(request.payload))

    async def on_message(_: AsyncBaseSocketModeClient, message: Mapping[str, Any], __: str | None = None) -> None:
        if message.get("type") == "hello":
            await guarded(connected())

    async def guarded(work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 # raised where listen is awaited; the library would only log it
            _end(ended, error)

    client = _Client(open_connection)
    client.message_listeners.append(on_message)
    client.socket_mode_request_listeners.append(on_request)
    connecting = asyncio.create_task(client.connect())  # type: ignore[no-untyped-call]
    try:
        await ended
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        tasks = [client.message_processor, client.current_session_monitor, client.message_receiver]
        await client.close()  # type: ignore[no-untyped-call]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


def _end(ended: asyncio.Future[None], error: Exception) -> None:
    if not ended.done():
        ended.set_exception(error)
