"""The options of an instance of SharePoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, field_validator, model_validator

from pipeline.core.addresses import is_https_or_local

Address = Annotated[str, StringConstraints(to_lower=True, pattern=r"^[^@\s/]+@[^@\s/]+\.[^@\s/]+$")]
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]{3,100}$")]


class SharePointOptions(BaseModel):
    """``sites``, ``all_sites``, ``onedrives`` and ``all_onedrives`` together say what is read; at least one is
    required. One of ``certificate``, ``client_secret`` and ``federated_token_file`` is the application's credential."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    tenant_id: Id
    """The directory (tenant) id, or one of its domains."""
    client_id: Id
    """The application (client) id."""
    certificate: SecretStr | None = None
    """PEM: the private key and its certificate, or the path of the file that holds both. SharePoint's own API, which
    alone knows the members of site groups, accepts only applications that sign in with a certificate."""
    client_secret: SecretStr | None = None
    """The application's secret, if it has no certificate."""
    federated_token_file: Path | None = None
    """The file in which a workload identity writes its token, read anew for each request."""

    sites: tuple[str, ...] = ()
    """Addresses of sites, such as ``https://acme.sharepoint.com/sites/Marketing``: all of their libraries. Sites below
    a site are named themselves."""
    all_sites: bool = False
    """Every site, now or later, that is nobody's OneDrive."""
    onedrives: tuple[Address, ...] = ()
    """The OneDrive of these users (by user principal name)."""
    all_onedrives: bool = False
    """Every user's OneDrive, now or later."""
    pages: bool = True
    """Whether to read the pages of sites, too."""

    permissions: Literal["items", "hierarchy"] = "items"
    """Where access comes from. ``items``: a request for each document. ``hierarchy``: a request for each document and
    folder that has permissions of its own, according to the log of changes; Microsoft guarantees that log for
    applications with Sites.FullControl.All alone."""
    site_groups: bool = True
    """Whether to read the members of site groups (Owners, Members, Visitors) from SharePoint's own API. Without them,
    sharing with a site group grants nothing."""
    organization_links: bool = False
    """Whether a link that works for everybody in the organisation counts as access for everybody in it."""
    anonymous_links: bool = False
    """Whether a link that works for anybody counts as access for everybody in the organisation."""
    user_name: Literal["mail", "userPrincipalName"] = "mail"
    """The attribute of a user that is the principal; a user without mail is known by the user principal name."""

    page_size: int = Field(default=50, ge=1, le=200)
    """Items on a page of a full read or of changes; their texts (at most 4 MiB each) are in memory at the same time."""
    sweep_page_size: int = Field(default=200, ge=1, le=1000)
    """Items on a page of a listing without texts."""
    max_bytes: int = Field(default=50 * 1024 * 1024, ge=1)
    """Largest file that is downloaded."""
    login_url: str = "https://login.microsoftonline.com"
    """Where access tokens are requested; national clouds have their own."""
    graph_url: str = "https://graph.microsoft.com"
    """The address of Microsoft Graph; national clouds have their own."""
    sharepoint_url: str | None = None
    """The address of SharePoint's own API; None: the host of each site."""
    hosts: tuple[str, ...] = (".sharepoint.com", ".sharepoint.us", ".sharepoint-mil.us", ".sharepoint.cn")
    """Hosts of SharePoint, which serve downloads and SharePoint's own API."""

    @field_validator("login_url", "graph_url", "sharepoint_url")
    @classmethod
    def _is_https(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if not is_https_or_local(url):
            raise ValueError("is not an https address: access tokens would be sent unencrypted")
        return url.rstrip("/")

    @field_validator("sites")
    @classmethod
    def _are_addresses(cls, sites: tuple[str, ...]) -> tuple[str, ...]:
        for site in sites:
            parts = urlsplit(site)
            if parts.scheme != "https" or not parts.hostname or parts.query or parts.fragment:
                raise ValueError("name each site by its address: https://acme.sharepoint.com/sites/Marketing")
        return tuple(site.rstrip("/") for site in sites)

    @model_validator(mode="after")
    def _is_complete(self) -> SharePointOptions:
        if not (self.sites or self.all_sites or self.onedrives or self.all_onedrives):
            raise ValueError("nothing to read: name sites or onedrives, or set all_sites or all_onedrives")
        credentials = (self.certificate, self.client_secret, self.federated_token_file)
        if sum(credential is not None for credential in credentials) != 1:
            raise ValueError("set exactly one of certificate, client_secret and federated_token_file")
        return self
