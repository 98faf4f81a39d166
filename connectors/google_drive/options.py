"""The options of an instance of Google Drive."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, field_validator, model_validator

from pipeline.core.addresses import is_https_or_local

Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{5,200}$")]
"""Id of a file, folder or shared drive: the part of its address after ``/folders/`` or ``/d/``."""
Address = Annotated[str, StringConstraints(to_lower=True, pattern=r"^[^@\s]+@[^@\s]+\.[^@\s]+$")]
Domain = Annotated[str, StringConstraints(to_lower=True, pattern=r"^[a-z0-9-]+(\.[a-z0-9-]+)+$")]


class GoogleDriveOptions(BaseModel):
    """``drives``, ``all_drives``, ``folders``, ``my_drive`` and ``all_my_drives`` together say what is read: at least
    one is required."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    service_account_key: SecretStr | None = None
    """The JSON key of the service account, or a configuration of workload identity (``external_account``), or the path
    of the file that holds either. None: the credentials of the machine impersonate ``service_account``."""
    service_account: Address | None = None
    """The address of the service account, where workload identity takes the place of its key."""
    subject: Address | None = None
    """The user on whose behalf the Drive is read (domain-wide delegation); None: the service account itself."""
    drives: tuple[Id, ...] = ()
    """Shared drives, whole."""
    all_drives: bool = False
    """Every shared drive that the account is a member of, now or later."""
    folders: tuple[Id, ...] = ()
    """Folders with everything below them, in shared drives or in My Drive."""
    my_drive: bool = False
    """The files outside of shared drives that the account owns or that are shared with it."""

    all_my_drives: bool = False
    """The My Drive of every active user of the company, or of ``domains``: the files that the user owns
    (domain-wide delegation)."""

    directory: bool = True
    """Whether to read the members of groups from the Admin SDK. Without it, sharing with a group grants nothing."""
    directory_subject: Address | None = None
    """The user on whose behalf the directory is read (a role with the privilege Groups > Read); None: ``subject``."""
    domains: tuple[Domain, ...] = ()
    """Domains of the company whose users the directory lists: they find files that are shared with such a domain for
    everybody there to find. Needs one more scope (admin.directory.user.readonly)."""
    domain_links: bool = False
    """Whether "everybody in the domain who has the link" counts as everybody in the domain."""
    anyone_tag: str | None = None
    """The tag of files that are open to anyone, with or without a link: ``domain:example.com`` or
    ``group:all@example.com``. None: being open to anyone grants nothing."""

    page_size: int = Field(default=50, ge=1, le=1000)
    """Files, or changes, on a page; their texts (at most 4 MiB each) are in memory at the same time."""
    sweep_page_size: int = Field(default=1000, ge=1, le=1000)
    """Files on a page of a listing without texts."""
    max_bytes: int = Field(default=50 * 1024 * 1024, ge=1)
    """Largest file that is downloaded."""
    api_url: str = "https://www.googleapis.com"
    """The address of the Drive API."""
    directory_url: str = "https://admin.googleapis.com"
    """The address of the Admin SDK."""

    @field_validator("anyone_tag")
    @classmethod
    def _is_group_or_domain(cls, tag: str | None) -> str | None:
        if tag is not None and (not tag.startswith(("domain:", "group:")) or tag != tag.lower()):
            raise ValueError("is neither domain:… nor group:…, in lower case")
        return tag

    @field_validator("api_url", "directory_url")
    @classmethod
    def _is_https(cls, url: str) -> str:
        if not is_https_or_local(url):
            raise ValueError("is not an https address: access tokens would be sent unencrypted")
        return url

    @model_validator(mode="after")
    def _reads_something(self) -> GoogleDriveOptions:
        if not (self.drives or self.all_drives or self.folders or self.my_drive or self.all_my_drives):
            raise ValueError("nothing to read: name drives or folders, or set all_drives, my_drive or all_my_drives")
        if self.all_my_drives and self.directory_subject is None and self.subject is None:
            raise ValueError("all_my_drives: set directory_subject, a user who may list the users of the company")
        if self.service_account_key is None and self.service_account is None:
            raise ValueError("set service_account_key, or with workload identity service_account")
        return self
