"""Slack's Web API (one call, all pages of a list, the meaning of its errors) and Socket Mode.

docs.slack.dev/apis/web-api: every response is 200 with ``ok``; limits count each method by itself.

docs.slack.dev/apis/events-api/using-socket-mode: events arrive over a websocket that we open, so that no public address
is needed. The library's client maintains the connection. Its log messages may hold the address with its ticket, so none
of them is logged.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import structlog
from pydantic import SecretStr
from slack_sdk.socket_mode.aiohttp import SocketModeClient
from slack_sdk.socket_mode.async_client import AsyncBaseSocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.socket_mode.response import SocketModeResponse

from connectors.listings import moved_on
from connectors.rows import size_of
from connectors.slack.oauth import EXPIRED, SlackToken
from connectors.web import Denied, Limits, Missing, Rejected, ServerFailed, TooLarge, Web
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
_MISCONFIGURED = frozenset(
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
_OF_A_TEAM = frozenset({"conversations.list", "users.list", "usergroups.list"})
"""The methods to which a token of an organisation has to name a workspace."""
MAX_THREAD_BYTES = 256 * 1024 * 1024
"""The most memory for the messages of a thread: those of 4 MiB of text, the most that a document has, take about
200 MB where each has a line."""
_MAX_ATTEMPTS = 3
"""How often a list is read from its beginning, because Slack no longer knows a cursor, before an error is raised."""


class Absent(PenstockError):
    """There is no such channel or message, or the app may not see it."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class TooManyRows(Exception):
    """A list takes too much memory. ``first`` holds its first row."""

    def __init__(self, first: Sequence[Any]) -> None:
        super().__init__()
        self.first = first


class ScopeMissing(Misconfigured):
    """The token lacks a scope. ``needed`` holds the alternatives, any of which is enough."""

    def __init__(self, message: str, *, needed: Collection[str], provided: Collection[str]) -> None:
        super().__init__(message)
        self.needed = needed
        self.provided = provided


class InvalidCursor(PenstockError):
    """Slack no longer knows the cursor, and the list has to be read from its beginning."""


def failure(name: str, method: str, answer: Mapping[str, Any]) -> PenstockError:
    """Return the exception for a response with ``ok: false``. Its text quotes only the error code and the scopes."""
    error = answer.get("error")
    code = error if isinstance(error, str) and _CODE.fullmatch(error) else "unknown_error"
    message = f"{name}: Slack answered {code} to {method}"
    if code == "missing_scope":
        needed, provided = _scopes(answer.get("needed")), _scopes(answer.get("provided"))
        scopes = " or ".join(needed) or "(Slack does not say which)"
        return ScopeMissing(
            f"{message}: add the scope {scopes} to the app and install it again",
            needed=needed,
            provided=provided,
        )
    if code == "invalid_cursor":
        return InvalidCursor(message)
    if code in _ABSENT:
        return Absent(message, code=code)
    if code in _THROTTLED:
        return Deferred(f"{message}: too many requests")
    if code in _MISCONFIGURED:
        return Misconfigured(f"{message}: check the app's token, its scopes and that it is installed in the workspace")
    return ServerFailed(message)


def _scopes(text: object) -> tuple[str, ...]:
    names = text.split(",") if isinstance(text, str) else ()
    return tuple(name for name in (part.strip() for part in names) if re.fullmatch(r"[a-z._:]{1,64}", name))


class Bearer(httpx.Auth):
    """Authentication by token. It records the token's scopes, which each response names in ``x-oauth-scopes``."""

    def __init__(self, token: SecretStr) -> None:
        self._token = token
        self.scopes: frozenset[str] | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = f"Bearer {self._token.get_secret_value()}"
        response = yield request
        if (scopes := response.headers.get("x-oauth-scopes")) is not None:
            self.scopes = frozenset(_scopes(scopes))


class Api:
    """The Web API. Every method may raise Deferred, Retryable, Misconfigured (also ScopeMissing) and Absent."""

    def __init__(
        self,
        base_url: str,
        token: SecretStr | SlackToken,
        *,
        name: str,
        rows: int,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        files_url: str | None = None,
        team: str | None = None,
    ) -> None:
        """``name`` is the connector's, for messages. ``rows`` is the number of rows to request at once from a list.
        ``files_url`` is where ``download`` reads files. ``team`` is the workspace whose channels and people an
        organisation's token lists. Raises Misconfigured for a token that cannot be one."""
        self.name = name
        self._team = team
        self._rows = rows
        self._bearer = token if isinstance(token, SlackToken) else Bearer(_valid_token(token, name))
        self._web = Web(base_url, auth=self._bearer, name=name, limits=limits)
        self._files = Web(files_url or base_url, auth=self._bearer, name=name, limits=limits)

    @property
    def scopes(self) -> frozenset[str] | None:
        """The token's scopes; None before the first response."""
        return self._bearer.scopes

    async def close(self) -> None:
        await self._web.close()
        await self._files.close()
        if isinstance(self._bearer, SlackToken):
            await self._bearer.close()

    async def call(self, method: str, **arguments: str | int | bool | None) -> Object:
        """Return the response when it is ok. Also raises InvalidCursor. A response that is too large is requested again
        with half the limit, and one to an expired token with the next token, where tokens rotate."""
        if method in _OF_A_TEAM:
            arguments = {"team_id": self._team, **arguments}
        if not isinstance(self._bearer, SlackToken):
            answer = await self._send(method, arguments)
        else:
            token = await self._bearer.token()
            answer = await self._send(method, arguments)
            if answer.get("error") in EXPIRED:
                await self._bearer.token(refused=token)
                answer = await self._send(method, arguments)
        if answer.get("ok") is not True:
            raise failure(self.name, method, answer)
        return answer

    async def _send(self, method: str, arguments: Mapping[str, str | int | bool | None]) -> Object:
        form = {
            key: str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in arguments.items()
            if value is not None
        }
        try:
            answer = await self._web.json("POST", method, data=form, bucket=method)
        except TooLarge as error:
            limit = arguments.get("limit")
            if isinstance(limit, int) and limit > 1:
                return await self._send(method, {**arguments, "limit": limit // 2})
            raise Retryable(f"{self.name}: Slack's response to {method} is larger than {error.limit} bytes") from error
        except (Denied, Missing) as error:
            raise Misconfigured(f"{self.name}: {method} was refused ({error.status}): check base_url") from error
        except Rejected as error:
            raise Retryable(f"{self.name}: Slack answered {error.status} to {method}") from error
        if not isinstance(answer, dict):
            raise Retryable(f"{self.name}: the response to {method} is not Slack's: it is not a JSON object")
        return answer

    async def download(self, url: str, to: Path, *, max_bytes: int) -> str:
        """Write a file of ``files_url`` to a path, and return its media type. Raises the errors of ``Web``."""
        return await self._files.download(url, to, max_bytes=max_bytes)

    async def all_rows(
        self, method: str, field: str, *, most_bytes: float = math.inf, **arguments: str | int | bool | None
    ) -> list[Any]:
        """Return all rows of a list, in Slack's order. When a cursor expires, the list is read from its beginning.
        Raises TooManyRows when those of several pages take more memory than that."""
        for _ in range(_MAX_ATTEMPTS):
            try:
                return await self._read_all(method, field, arguments, most_bytes)
            except InvalidCursor as error:
                expired = error
        raise Retryable(f"{self.name}: the cursors of {method} expire faster than they can be used") from expired

    async def _read_all(
        self, method: str, field: str, arguments: Mapping[str, str | int | bool | None], most_bytes: float
    ) -> list[Any]:
        rows: list[Any] = []
        cursor: str | None = None
        size = counted = 0
        while True:
            answer = await self.call(method, **arguments, limit=self._rows, cursor=cursor)
            rows += _rows(answer, field, f"{self.name}: {method}")
            metadata = answer.get("response_metadata")
            after = metadata.get("next_cursor") if isinstance(metadata, dict) else None
            if not after:
                if answer.get("has_more") is True:
                    raise Retryable(f"{self.name}: {method} reports more rows but returns no cursor")
                return rows
            moved_on(after, cursor, f"{self.name}: {method}")
            if most_bytes < math.inf:
                size += await asyncio.to_thread(size_of, rows[counted:], most_bytes)
                counted = len(rows)
                if size > most_bytes:
                    raise TooManyRows(rows[:1])
            cursor = after

    async def history(
        self, channel: str, *, limit: int, latest: str | None = None, oldest: str | None = None
    ) -> tuple[list[Object], str | None]:
        """Return messages before ``latest``, newest first and without replies that were not also sent to the channel,
        and the next ``latest`` (None: this was the last page). A ``ts`` is used instead of a cursor because it never
        expires: a full read resumes after any pause."""
        answer = await self.call(
            "conversations.history", channel=channel, limit=limit, latest=latest, oldest=oldest, inclusive=False
        )
        messages = [row for row in _rows(answer, "messages", f"{self.name}: conversations.history") if _is_message(row)]
        if answer.get("has_more") is not True:
            return messages, None
        if not messages:
            raise Retryable(f"{self.name}: conversations.history reports more messages but returns none")
        return messages, min((str(row["ts"]) for row in messages), key=float)

    async def thread(self, channel: str, ts: str) -> list[Object]:
        """Return a parent and its replies, oldest first, each once. Raises TooManyRows."""
        rows = await self.all_rows(
            "conversations.replies", "messages", most_bytes=MAX_THREAD_BYTES, channel=channel, ts=ts
        )
        messages = {str(row["ts"]): row for row in rows if _is_message(row)}
        return [messages[ts] for ts in sorted(messages, key=float)]


def _rows(answer: Mapping[str, Any], field: str, where: str) -> list[Any]:
    rows = answer.get(field)
    if not isinstance(rows, list):
        raise Retryable(f"{where} answered without {field}")
    return rows


def _is_message(row: object) -> bool:
    return isinstance(row, dict) and isinstance(row.get("ts"), str) and re.fullmatch(r"\d+\.\d+", row["ts"]) is not None


def _valid_token(token: SecretStr, name: str) -> SecretStr:
    text = token.get_secret_value().strip()
    if not text or not text.isascii() or not text.isprintable():
        raise Misconfigured(f"{name}: the token is empty or holds characters that no token has: copy it again")
    return SecretStr(text)


PING_SECONDS = 5.0
log = structlog.get_logger()

_silent = logging.getLogger(f"{__name__}.client")
_silent.propagate = False
_silent.disabled = True


class _Client(SocketModeClient):
    """The library's client, which gets its addresses through ``Api`` (for its limits and errors) and uses no proxy."""

    def __init__(self, open_connection: Callable[[], Awaitable[str]]) -> None:
        super().__init__(app_token="", logger=_silent, ping_interval=PING_SECONDS)
        self.proxy = None
        self._open_connection = open_connection

    async def issue_new_wss_url(self) -> str:
        return await self._open_connection()


async def listen(
    api: Api, react: Callable[[Mapping[str, Any]], Awaitable[None]], connected: Callable[[], Awaitable[None]]
) -> None:
    """Receive events until cancelled. ``react`` is called with each envelope's payload after it was acknowledged, and
    ``connected`` with each new connection, because events without one may be lost. Raises Misconfigured when the token
    is refused, and the errors of ``react`` and ``connected``."""
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open_connection() -> str:
        while True:
            try:
                return str((await api.call("apps.connections.open"))["url"])
            except Deferred as error:
                await asyncio.sleep(error.retry_after or 30.0)
            except Retryable as error:
                log.warning("slack_socket_delayed", source=api.name, error=str(error))
                await asyncio.sleep(error.retry_after or PING_SECONDS)
            except Misconfigured as error:
                _fail(failed, error)
                raise

    async def on_request(client: AsyncBaseSocketModeClient, request: SocketModeRequest) -> None:
        await client.send_socket_mode_response(SocketModeResponse(envelope_id=request.envelope_id))
        if request.type != "events_api":
            return
        await fail_on_error(react(request.payload))

    async def on_message(_: AsyncBaseSocketModeClient, message: Mapping[str, Any], __: str | None = None) -> None:
        if message.get("type") == "hello":
            await fail_on_error(connected())

    async def fail_on_error(work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 # listen raises it; the library would only log it
            _fail(failed, error)

    client = _Client(open_connection)
    client.message_listeners.append(on_message)
    client.socket_mode_request_listeners.append(on_request)
    connecting = asyncio.create_task(client.connect())  # type: ignore[no-untyped-call]
    try:
        await failed
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        tasks = [client.message_processor, client.current_session_monitor, client.message_receiver]
        await client.close()  # type: ignore[no-untyped-call]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


def _fail(failed: asyncio.Future[None], error: Exception) -> None:
    if not failed.done():
        failed.set_exception(error)
