"""What exactly is missing before Slack can be read."""

from __future__ import annotations

from collections.abc import Sequence

from connectors.protocol import Problem
from connectors.slack.api import Api
from connectors.slack.directory import Directory
from connectors.slack.options import SlackOptions
from connectors.slack.people import Channel
from pipeline.core.errors import Misconfigured

_PUBLIC = {
    "channels:read": "to list public channels and their members",
    "channels:history": "to read the messages of public channels",
    "users:read": "to name the authors",
    "users:read.email": "to know a member by the e-mail address that the whole company knows",
    "usergroups:read": "to name the user groups that messages mention",
}
_PRIVATE = {
    "groups:read": "to list the private channels that the app is invited to, and their members",
    "groups:history": "to read the messages of private channels that the app is invited to",
}


def needed(options: SlackOptions) -> dict[str, str]:
    """Scopes of the bot token, and what each is for."""
    return {**_PUBLIC, **(_PRIVATE if options.private else {})}


async def check(
    api: Api, socket: Api | None, directory: Directory, options: SlackOptions, *, name: str, has_events_url: bool
) -> Sequence[Problem]:
    """socket: with the app-level token, where there is one. Raises Deferred and Retryable."""
    problems: list[Problem] = []
    try:
        app = f"@{(await api.call('auth.test')).get('user') or 'app'}"
    except Misconfigured as error:
        return [Problem("token", "token", _said(error, name))]
    lacking = [scope for scope in needed(options) if api.scopes is not None and scope not in api.scopes]
    problems += [
        Problem(
            "token", "missing_scope",
            f"the bot token lacks the scope {scope}, {needed(options)[scope]}: add it under OAuth & Permissions and"
            " install the app again",
        ) for scope in lacking
    ]  # fmt: skip
    if not {"channels:read", "groups:read"} & set(lacking):
        try:
            problems += _channels(list((await directory.channels()).values()), options, app)
        except Misconfigured as error:
            problems.append(Problem("channels", "channels", _said(error, name)))
    if socket is not None:
        try:
            await socket.call("apps.connections.open")
        except Misconfigured as error:
            message = "Socket Mode needs an app-level token (xapp-…) with the scope connections:write"
            problems.append(Problem("app_token", "app_token", f"{_said(error, name)}; {message}"))
    elif has_events_url and options.signing_secret is None:
        problems.append(
            Problem(
                "signing_secret", "signing_secret",
                "there is none, so every event is refused: take it from Basic Information of the app, or set app_token"
                " for Socket Mode",
            )
        )  # fmt: skip
    if options.archive is not None and not options.archive.is_file():
        problems.append(
            Problem("archive", "archive", "the export is not there: correct the path, or remove the setting")
        )
    return problems


def _channels(visible: Sequence[Channel], options: SlackOptions, app: str) -> list[Problem]:
    """Channels that the settings name and the app is not in. Without such names: whether it is in any. app: its name,
    as people mention it."""
    wanted = [one for one in visible if options.admits(one.id, one.name, is_private=one.is_private)]
    problems = []
    for pattern in options.channels:
        alone = options.model_copy(update={"channels": (pattern,)})
        matching = [one for one in wanted if alone.admits(one.id, one.name, is_private=one.is_private)]
        if not matching:
            problems.append(
                Problem(
                    "channels", "not_invited",
                    f"no channel {pattern} is visible: if it is private, write /invite {app} there; else correct the"
                    " name",
                )
            )  # fmt: skip
        problems += [_invite(app, one) for one in matching if not one.is_member and not one.is_archived]
    if not options.channels and not any(one.is_member for one in wanted):
        problems.append(
            Problem(
                "channels", "not_invited", f"the app is in none yet: write /invite {app} in those that shall be read"
            )
        )
    return problems


def _invite(app: str, channel: Channel) -> Problem:
    return Problem(f"#{channel.name}", "not_invited", f"the app is not in this channel: write /invite {app} there")


def _said(error: Misconfigured, name: str) -> str:
    """Without the connector's name, which whoever shows a problem says."""
    return str(error).removeprefix(f"{name}: ")
