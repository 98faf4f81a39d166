"""The settings of a Jira connector."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr, StringConstraints, model_validator

from connectors.atlassian import AtlassianOptions

ProjectKey = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]{0,254}$")]


class JiraOptions(AtlassianOptions):
    flavour: Literal["cloud", "data-center"] = "cloud"
    """The edition of Jira."""
    base_url: str
    """Cloud: ``https://NAME.atlassian.net``; with OAuth or a scoped token
    ``https://api.atlassian.com/ex/jira/CLOUD-ID``. Data Center: the base URL of its general settings."""
    site_url: str | None = None
    """Cloud through api.atlassian.com: ``https://NAME.atlassian.net``, for links that people open."""
    email: str | None = None
    """Cloud: the address of the account that owns the API token; None for an OAuth access token. Data Center: None."""
    token: SecretStr
    """Cloud: API token or OAuth access token. Data Center: personal access token."""
    webhook_secret: SecretStr | None = None
    """The secret that signs events; None: events are refused."""
    projects: tuple[ProjectKey, ...] = ()
    """The keys of the projects to read. Empty: every project that the account may browse."""
    exclude_projects: tuple[ProjectKey, ...] = ()
    """The keys of projects that are never read."""
    comments: bool = True
    """Whether to read comments. Those that everybody may read who may read the issue are a part of its document; the
    others are documents of their own."""
    overlap_minutes: int = Field(default=10, ge=2, le=24 * 60)
    """How far each poll overlaps the one before: Jira's search lags behind, and knows times by the minute."""
    page_size: int = Field(default=50, ge=1, le=100)
    """Issues on a page with their texts."""
    sweep_page_size: int = Field(default=100, ge=1, le=1_000)
    """Issues on a page of a listing. Jira returns fewer where it limits pages further."""
    anonymous_tag: str | None = None
    """Holders of this tag may read what anybody may read without logging in. None: such a permission admits nobody."""

    @model_validator(mode="after")
    def _matches_flavour(self) -> JiraOptions:
        if self.flavour == "data-center" and self.email is not None:
            raise ValueError("email belongs to Cloud: Data Center takes a personal access token alone")
        if self.flavour == "cloud" and self.email_domain is not None:
            raise ValueError("email_domain belongs to Data Center")
        return self
