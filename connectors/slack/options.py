"""The settings of one Slack workspace."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class SlackOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    token: SecretStr
    """The app's bot token (``xoxb-…``)."""
    signing_secret: SecretStr | None = None
    """For the Events API over HTTP. Without it every event that reaches us is refused."""
    app_token: SecretStr | None = None
    """An app-level token (``xapp-…``, scope connections:write) turns Socket Mode on."""
    base_url: str = "https://slack.com/api"

    channels: tuple[str, ...] = ()
    """Names (wildcards allowed) or ids of channels; empty: every channel that the app is a member of."""
    exclude: tuple[str, ...] = ()
    """Names (wildcards allowed) or ids of channels that are never read."""
    private: bool = True
    """Whether private channels that the app is a member of are read."""
    archived: Literal["keep", "drop"] = "keep"
    """What becomes of a public channel's documents when it is archived (Slack puts bots out of it)."""
    min_characters: Annotated[int, Field(ge=0, le=1_000)] = 0
    """A message that nobody has answered and that is shorter is no document."""
    trust_external_emails: bool = False
    """Whether members from other companies (Slack Connect) are known by the e-mail address that their company set."""

    page_size: Annotated[int, Field(ge=1, le=200)] = 50
    """Threads in one page of a full read."""
    rows_per_request: Annotated[int, Field(ge=1, le=999)] = 500
    """How many messages, members or channels Slack is asked for at once."""
    overlap_seconds: Annotated[int, Field(ge=0, le=86_400)] = 600
    """How far a poll goes back before the one before it: late messages, edits and deletes in it are seen."""
    thread_days: Annotated[float, Field(ge=0, le=90)] = 2
    """A poll sees answers to threads that began in the last days; older threads are left to events and sweeps."""
    forget_lost_after_hours: Annotated[float, Field(ge=0, le=24 * 90)] = 24
    """A channel that the app was removed from is closed to everybody at once; after so long its documents go."""

    archive: Path | None = None
    """A Slack export (ZIP) that a full read takes first."""

    def admits(self, id: str, name: str, *, is_private: bool) -> bool:
        if is_private and not self.private:
            return False
        if _named(self.exclude, id, name):
            return False
        return not self.channels or _named(self.channels, id, name)


def _named(patterns: tuple[str, ...], id: str, name: str) -> bool:
    return any(pattern == id or fnmatchcase(name, pattern.removeprefix("#")) for pattern in patterns)
