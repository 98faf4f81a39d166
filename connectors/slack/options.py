"""The settings of one Slack workspace."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator


class SlackOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    token: SecretStr | None = None
    """The app's bot token (``xoxb-…``)."""
    client_id: str | None = None
    """Instead of ``token``, for an app with token rotation: the app's client id."""
    client_secret: SecretStr | None = None
    """The app's client secret."""
    refresh_token: SecretStr | None = None
    """The bot's refresh token (``xoxe-…``). The ones that replace it are stored in Postgres, sealed."""
    team: Annotated[str, Field(pattern=r"^T[A-Z0-9]{1,40}$")] | None = None
    """The id of the workspace to read, for an app that is installed in a whole organisation (Enterprise Grid)."""
    signing_secret: SecretStr | None = None
    """The secret that signs the events of the Events API over HTTP. None: every such event is refused."""
    app_token: SecretStr | None = None
    """An app-level token (``xapp-…``, scope connections:write) turns Socket Mode on."""
    base_url: str = "https://slack.com/api"
    """The address of the Web API."""
    files_url: str = "https://files.slack.com"
    """The address of the files; the token is sent to no other one."""

    channels: tuple[str, ...] = ()
    """Names (wildcards allowed) or ids of channels; empty: every channel that the app is a member of."""
    exclude: tuple[str, ...] = ()
    """Names (wildcards allowed) or ids of channels that are never read."""
    join: bool = False
    """Whether the app joins the public channels that ``channels`` and ``exclude`` select, also later ones (scope
    channels:join); otherwise it has to be invited."""
    private: bool = True
    """Whether private channels that the app is a member of are read."""
    archived: Literal["keep", "drop"] = "keep"
    """Whether a public channel's documents stay when it is archived, which removes the app from it."""
    min_characters: Annotated[int, Field(ge=0, le=1_000)] = 0
    """A message without replies that is shorter than this is no document."""
    files: bool = False
    """Whether the texts of files and snippets are read (scope files:read); otherwise only their names are."""
    max_file_bytes: Annotated[int, Field(ge=1)] = 10_000_000
    """The largest file that is read."""
    trust_external_emails: bool = False
    """Whether members from other companies (Slack Connect) are known by the e-mail address that their company set."""

    page_size: Annotated[int, Field(ge=1, le=200)] = 50
    """The number of threads in one page of a full read."""
    rows_per_request: Annotated[int, Field(ge=1, le=999)] = 500
    """How many messages, members or channels to request at once."""
    overlap_seconds: Annotated[int, Field(ge=0, le=86_400)] = 600
    """How far each poll overlaps the one before: late messages, edits and deletions in this time are detected."""
    thread_days: Annotated[float, Field(ge=0, le=90)] = 2
    """A poll detects replies to threads that began in the last days; older threads are left to events and sweeps."""
    forget_lost_after_hours: Annotated[float, Field(ge=0, le=24 * 90)] = 24
    """A channel that the app was removed from is closed to everybody at once; after this time its documents go."""

    archive: Path | None = None
    """A Slack export (ZIP) from which a full read takes the replies of threads."""

    @model_validator(mode="after")
    def _has_one_credential(self) -> SlackOptions:
        rotating = [self.client_id, self.client_secret, self.refresh_token]
        if any(rotating) and (not all(rotating) or self.token is not None):
            raise ValueError("token rotation takes client_id, client_secret and refresh_token, without token")
        if not any(rotating) and self.token is None:
            raise ValueError("set token, or client_id, client_secret and refresh_token of an app with token rotation")
        return self

    def is_selected(self, id: str, name: str, *, is_private: bool) -> bool:
        """True when these settings select a channel."""
        if is_private and not self.private:
            return False
        if _named(self.exclude, id, name):
            return False
        return not self.channels or _named(self.channels, id, name)


def _named(patterns: tuple[str, ...], id: str, name: str) -> bool:
    return any(pattern == id or fnmatchcase(name, pattern.removeprefix("#")) for pattern in patterns)
