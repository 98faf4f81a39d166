"""The settings of a Confluence connector."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, model_validator

from connectors.atlassian import AtlassianOptions

Kinds = tuple[Literal["page", "blogpost", "attachment"], ...]


class ConfluenceOptions(AtlassianOptions):
    flavour: Literal["cloud", "data-center"] = "cloud"
    """The edition of Confluence."""
    base_url: str
    """Cloud: ``https://NAME.atlassian.net/wiki``; with OAuth or a scoped token
    ``https://api.atlassian.com/ex/confluence/CLOUD-ID/wiki``. Data Center: the base URL of its general settings."""
    site_url: str | None = None
    """Cloud through api.atlassian.com: ``https://NAME.atlassian.net/wiki``, for links that people open."""
    email: str | None = None
    """Cloud: the address of the account that owns the API token; None for an OAuth access token. Data Center: None."""
    token: SecretStr | None = None
    """Cloud: API token, or OAuth access token, which lasts an hour. Data Center: personal access token."""
    client_id: str | None = None
    """Cloud, instead of ``token``: the id of an OAuth 2.0 app (3LO), whose access tokens are renewed."""
    client_secret: SecretStr | None = None
    """The app's secret."""
    refresh_token: SecretStr | None = None
    """The refresh token that the app received when its account authorized it. The ones that replace it are stored in
    Postgres, sealed."""
    oauth_url: str = "https://auth.atlassian.com"
    """Address of Atlassian's authorization server."""
    webhook_secret: SecretStr | None = None
    """The secret that signs events; None: events are refused."""
    spaces: tuple[str, ...] = ()
    """The keys of the spaces to read. Empty: every global space that the account may view."""
    exclude_spaces: tuple[str, ...] = ()
    """The keys of spaces that are never read."""
    personal_spaces: bool = False
    """Whether to read personal spaces too, where ``spaces`` is empty."""
    blog_posts: bool = True
    """Whether to read blog posts."""
    comments: bool = True
    """Whether to read comments, as a part of their page's document."""
    overlap_minutes: int = Field(default=10, ge=2, le=24 * 60)
    """How far each poll overlaps the one before: the search index lags, and knows times by the minute."""
    page_size: int = Field(default=50, ge=1, le=200)
    """The number of documents to read at once."""
    anonymous_tag: str | None = None
    """Data Center: holders of this tag may read what anonymous visitors may. None: anonymous access admits nobody."""
    licensed_tag: str | None = None
    """Cloud with roles for spaces: holders of this tag may read what all licensed users may; such as ``group:ID``, of
    the group of all of them. None: that admits nobody."""

    @model_validator(mode="after")
    def _matches_flavour(self) -> ConfluenceOptions:
        app = [self.client_id, self.client_secret, self.refresh_token]
        if any(app) and (not all(app) or self.token is not None or self.email is not None):
            raise ValueError("an OAuth app takes client_id, client_secret and refresh_token, without token and email")
        if not any(app) and self.token is None:
            raise ValueError("set token, or client_id, client_secret and refresh_token of an OAuth app")
        if self.flavour == "data-center" and any(app):
            raise ValueError("client_id belongs to Cloud: Data Center takes a personal access token")
        if self.flavour == "data-center" and self.email is not None:
            raise ValueError("email belongs to Cloud: Data Center takes a personal access token alone")
        if self.flavour == "cloud" and (self.anonymous_tag is not None or self.email_domain is not None):
            raise ValueError("anonymous_tag and email_domain belong to Data Center")
        if self.flavour == "data-center" and self.licensed_tag is not None:
            raise ValueError("licensed_tag belongs to Cloud, which alone has roles for spaces")
        return self

    @property
    def kinds(self) -> Kinds:
        kinds: list[Literal["page", "blogpost", "attachment"]] = ["page"]
        kinds += ["blogpost"] if self.blog_posts else []
        kinds += ["attachment"] if self.attachments else []
        return tuple(kinds)
