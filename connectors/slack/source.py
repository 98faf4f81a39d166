"""Slack as a source: the threads of the channels of which an app is a member, and a check of its token and settings."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

from pydantic import BaseModel, SecretStr
from slack_sdk.signature import SignatureVerifier

from connectors.errors import BadData
from connectors.protocol import Problem
from connectors.set_aside import reading_data
from connectors.slack import client, events
from connectors.slack.access import Channel, Directory, team_problem, workspace_tag
from connectors.slack.client import Api
from connectors.slack.content import tag
from connectors.slack.files import Files
from connectors.slack.oauth import SlackToken
from connectors.slack.options import SlackOptions
from connectors.slack.reading import Lister, LostChannels, Reader
from connectors.source import (
    Context,
    Cursor,
    Entry,
    Group,
    Listed,
    MetadataKeys,
    Page,
    Playground,
    Reaction,
    Refused,
    Request,
    Unlisted,
)
from connectors.web import Limits
from pipeline.core.errors import Misconfigured

_PUBLIC = {
    "channels:read": "to list public channels and their members",
    "channels:history": "to read the messages of public channels",
    "users:read": "to name the authors",
    "users:read.email": "to know a member by the e-mail address that the whole company knows",
    "usergroups:read": "to name the user groups that messages mention",
}
_JOINING = {"channels:join": "to join the public channels that are read"}
_FILES = {"files:read": "to read the texts of files"}
_PRIVATE = {
    "groups:read": "to list the private channels that the app is invited to, and their members",
    "groups:history": "to read the messages of private channels that the app is invited to",
}


MAX_NAMED_TEAMS = 10
"""The workspaces that a problem names."""


def required_scopes(options: SlackOptions) -> dict[str, str]:
    """Return the scopes that the bot token needs, and the purpose of each."""
    return {
        **_PUBLIC,
        **(_JOINING if options.join else {}),
        **(_FILES if options.files else {}),
        **(_PRIVATE if options.private else {}),
    }


async def check(
    api: Api, socket: Api | None, directory: Directory, options: SlackOptions, *, name: str, has_events_url: bool
) -> Sequence[Problem]:
    """Return the problems of the tokens, scopes and settings. ``socket`` uses the app-level token; None: there is none.
    Raises Deferred and Retryable."""
    problems: list[Problem] = []
    try:
        answer = await api.call("auth.test")
        app = f"@{answer.get('user') or 'app'}"
        if problem := await _team_problem(answer, directory, options):
            return [Problem("team", "team", problem)]
    except Misconfigured as error:
        return [Problem("token", "token", _without_name(error, name))]
    purposes = required_scopes(options)
    lacking = [scope for scope in purposes if api.scopes is not None and scope not in api.scopes]
    problems += [
        Problem(
            "token",
            "missing_scope",
            f"the bot token lacks the scope {scope}, {purposes[scope]}: add it under OAuth & Permissions and"
            " install the app again",
        )
        for scope in lacking
    ]
    if not {"channels:read", "groups:read"} & set(lacking):
        try:
            visible = list((await directory.channels()).values())
            problems += _channel_problems(visible, options, app)
            if socket is None and not has_events_url:
                problems += _polling_problems(visible, options)
        except Misconfigured as error:
            problems.append(Problem("channels", "channels", _without_name(error, name)))
    if socket is not None:
        try:
            await socket.call("apps.connections.open")
        except Misconfigured as error:
            message = "Socket Mode needs an app-level token (xapp-…) with the scope connections:write"
            problems.append(Problem("app_token", "app_token", f"{_without_name(error, name)}; {message}"))
    elif has_events_url and options.signing_secret is None:
        problems.append(
            Problem(
                "signing_secret",
                "signing_secret",
                "it is not set, so every event is refused: copy it from Basic Information of the app, or set app_token"
                " for Socket Mode",
            )
        )
    if options.archive is not None and not options.archive.is_file():
        problems.append(
            Problem("archive", "archive", "the export does not exist: correct the path, or remove the setting")
        )
    return problems


async def _team_problem(answer: Mapping[str, Any], directory: Directory, options: SlackOptions) -> str | None:
    """Return the problem of the setting ``team``, with the workspaces that it may name."""
    problem = team_problem(answer, options.team)
    if answer.get("is_enterprise_install") is not True:
        return problem
    teams = await directory.teams()
    if options.team in teams:
        return None
    names = ", ".join(f"{id} ({name})" for id, name in sorted(teams.items())[:MAX_NAMED_TEAMS]) or "none"
    problem = problem or f"the organisation's app is not installed in the workspace {options.team}"
    return f"{problem}; it is installed in {names}"


def _channel_problems(visible: Sequence[Channel], options: SlackOptions, app: str) -> list[Problem]:
    """Return a problem for each channel that the settings name and of which the app is no member, or one problem if
    they name none and the app is a member of no channel. ``app`` is the app's name with its ``@``."""
    selected = [
        channel for channel in visible if options.is_selected(channel.id, channel.name, is_private=channel.is_private)
    ]
    problems = []
    for pattern in options.channels:
        single = options.model_copy(update={"channels": (pattern,)})
        matching = [
            channel
            for channel in selected
            if single.is_selected(channel.id, channel.name, is_private=channel.is_private)
        ]
        if not matching:
            problems.append(
                Problem(
                    "channels",
                    "not_invited",
                    f"no channel {pattern} is visible: if it is private, write /invite {app} there; else correct the"
                    " name",
                )
            )
        problems += [
            _invite(app, channel)
            for channel in matching
            if not channel.is_member and not channel.is_archived and (channel.is_private or not options.join)
        ]
    readable = (channel.is_member or (options.join and not channel.is_private) for channel in selected)
    if not options.channels and not any(readable):
        problems.append(
            Problem(
                "channels",
                "not_invited",
                f"the app is a member of no channel: write /invite {app} in each channel that shall be read",
            )
        )
    return problems


POLLED_CHANNELS = 125
"""The channels that polls read within two and a half minutes: Slack permits 50 requests a minute
(docs.slack.dev/apis/web-api/rate-limits, tier 3), and a poll sends one for each channel."""


def _polling_problems(visible: Sequence[Channel], options: SlackOptions) -> list[Problem]:
    """Return a problem if there are too many channels to notice changes without events."""
    read = [
        channel
        for channel in visible
        if not channel.is_archived
        and options.is_selected(channel.id, channel.name, is_private=channel.is_private)
        and (channel.is_member or (options.join and not channel.is_private))
    ]
    if len(read) <= POLLED_CHANNELS:
        return []
    return [
        Problem(
            "app_token",
            "no_events",
            f"{len(read)} channels are read without events: Slack permits 50 requests a minute, so that changes of"
            " messages and members are noticed later than after five minutes: set app_token for Socket Mode",
        )
    ]


def _invite(app: str, channel: Channel) -> Problem:
    return Problem(f"#{channel.name}", "not_invited", f"the app is not in this channel: write /invite {app} there")


def _without_name(error: Misconfigured, name: str) -> str:
    """Return the error's text without the connector's name, which is displayed with each problem anyway."""
    return str(error).removeprefix(f"{name}: ")


def _token(options: SlackOptions, context: Context, limits: Limits) -> SecretStr | SlackToken:
    if options.client_id is None or options.client_secret is None or options.refresh_token is None:
        assert options.token is not None
        return options.token
    return SlackToken(
        context.memory,
        base_url=options.base_url,
        client_id=options.client_id,
        client_secret=options.client_secret.get_secret_value(),
        refresh_token=options.refresh_token.get_secret_value(),
        name=context.name,
        limits=limits,
    )


class Slack:
    """A workspace as a Source. Each document is a thread; its external id is ``CHANNEL:TS`` of its parent."""

    Options: ClassVar[type[BaseModel]] = SlackOptions
    metadata_keys: ClassVar[MetadataKeys] = {"channel": "keyword", "participants": "keyword", "messages": "number"}

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        """A fake workspace, for ``penstock connector conform slack``."""
        from connectors.slack.playground import playing  # lazy: production never loads the fake

        return playing()

    def __init__(self, options: SlackOptions, context: Context, *, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        """Raises Misconfigured."""
        self._options = options
        self._context = context
        token = _token(options, context, limits)
        self._api = Api(
            options.base_url,
            token,
            name=context.name,
            rows=options.rows_per_request,
            limits=limits,
            files_url=options.files_url,
            team=options.team,
        )
        self._socket: Api | None = None
        if options.app_token is not None:
            self._socket = Api(options.base_url, options.app_token, name=context.name, rows=1)
        self._verifier: SignatureVerifier | None = None
        if options.signing_secret is not None and options.signing_secret.get_secret_value().strip():
            self._verifier = SignatureVerifier(options.signing_secret.get_secret_value().strip())
        self._directory = Directory(self._api, options)
        self._lost = LostChannels(self._directory, options, context.memory, context.folder)
        self._files = Files(self._api, options, context.folder, context.set_aside, context.memory)
        self._reader = Reader(self._api, self._directory, self._lost, self._files, options, context.set_aside)
        self._lister = Lister(self._api, self._directory, self._lost, options, context.set_aside)
        self._seen = events.SeenEvents()

    async def close(self) -> None:
        await self._api.close()
        if self._socket is not None:
            await self._socket.close()

    async def check(self) -> Sequence[Problem]:
        return await check(
            self._api,
            self._socket,
            self._directory,
            self._options,
            name=self._context.name,
            has_events_url=self._context.events_url is not None,
        )

    async def start(self) -> Cursor:
        return self._reader.now()

    def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        return self._reader.full(cursor)

    def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        return self._reader.changes(cursor)

    def slim(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        return self._lister.slim()

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        return await self._reader.fetch(external_ids)

    def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        return self._lister.groups(tags)

    # Events

    async def on_event(self, request: Request) -> Reaction:
        if self._verifier is None or not _is_signed(self._verifier, request):
            raise Refused(f"{self._context.name}: an event has no valid signature: is signing_secret the app's?")
        try:
            envelope = json.loads(request.body)
        except ValueError as error:
            raise Refused(f"{self._context.name}: an event is not valid JSON") from error
        if not isinstance(envelope, dict):
            raise Refused(f"{self._context.name}: an event is not a JSON object")
        challenge = envelope.get("challenge")
        if envelope.get("type") == "url_verification" and isinstance(challenge, str):
            return Reaction(answer=challenge.encode())
        return await self._reaction(envelope)

    async def _reaction(self, envelope: Mapping[str, Any]) -> Reaction:
        id = envelope.get("event_id")
        if id in self._seen:
            return Reaction()
        if not self._concerns(envelope):
            return Reaction()
        reaction, effect = events.reaction(envelope)
        if (file := events.file_of(envelope)) is not None:
            reaction = Reaction(ids=tuple(await self._files.threads(file)))
        if effect == "names":
            self._directory.expire_names()
        elif effect == "people" and not self._directory.update_user(envelope["event"].get("user")):
            reaction = Reaction(groups=await self._affected_tags(envelope["event"].get("type")))
        self._seen.add(id)
        return reaction

    def _concerns(self, envelope: Mapping[str, Any]) -> bool:
        """Whether an event concerns our workspace: an organisation's app receives those of all its workspaces. One of
        another workspace does, if it is about a channel that both have."""
        team, ours = envelope.get("team_id"), self._options.team
        if ours is None or team == ours or not isinstance(team, str) or not team.startswith("T"):
            return True
        return events.channel_of(envelope) in self._directory.cached_channels()

    async def _affected_tags(self, event: str) -> Collection[str]:
        """Return the tags to read again after a person's account changed: those of every channel, since they may be a
        member. A new person is a member of none, and joining one has an event of its own."""
        team = await self._directory.team()
        if event == "team_join":
            return [workspace_tag(team)]
        channels = self._directory.cached_channels() or await self._directory.channels()
        return [
            workspace_tag(team),
            *(tag(channel.id) for channel in channels.values() if self._directory.is_read(channel)),
        ]

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        if self._socket is None:
            return

        async def on_payload(payload: Mapping[str, Any]) -> None:
            try:
                with reading_data():
                    reaction = await self._reaction(payload)
            except BadData:  # it may be about anything
                reaction = Reaction(changes=True, sweep=True)
            await react(reaction)

        async def on_connected() -> None:
            await react(Reaction(changes=True))

        await client.listen(self._socket, on_payload, on_connected)


def _is_signed(verifier: SignatureVerifier, request: Request) -> bool:
    """Verify the HMAC-SHA256 over the request's bytes. A signature expires after five minutes."""
    try:
        return bool(verifier.is_valid_request(request.body, dict(request.headers)))
    except (ValueError, TypeError):  # the time is no number, the body no text or the signature not ASCII
        return False
