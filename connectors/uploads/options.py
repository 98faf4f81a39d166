"""The options of an instance of uploads, and the quotas of all instances."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict

from pipeline.core.errors import Misconfigured
from pipeline.runtime.settings import Part, explained
from topics.fields import AclTags, Member, RequiredTags, Tag


class UploadsQuota(Part):
    """Quotas of uploads that are not deleted, in all instances of one database. 0: no limit. Build it with
    ``load()``."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_UPLOADS_", frozen=True, extra="forbid")

    tenant_bytes: int = Field(50_000_000_000, ge=0)
    """The size of one tenant's files."""
    tenant_files: int = Field(100_000, ge=0)
    """The number of one tenant's files."""
    all_bytes: int = Field(200_000_000_000, ge=0)
    """The size of all tenants' files together."""
    all_files: int = Field(500_000, ge=0)
    """The number of all tenants' files together."""

    @classmethod
    def load(cls) -> Self:
        """Load the quotas from the environment. Raises Misconfigured with one line that names the variable."""
        try:
            return cls()
        except ValidationError as error:
            raise explained(error) from error


class UploadsOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Path | None = None
    """Folder of the original files; None: in the instance's folder. No other instance may use it."""
    max_bytes: Annotated[int, Field(ge=1, le=10**10)] = 50_000_000
    """Largest file. Reading it has further limits (connectors.extraction.limits)."""

    folder: Path | None = None
    """Drop folder: files put into it are uploaded. None: HTTP only."""
    acl_tags: AclTags = []
    """Access of files in ``folder`` for which no ``.penstock.toml`` states another. Empty: such files are not
    uploaded."""
    required_tags: RequiredTags = []
    """Tags that every reader of these files must hold as well."""
    done: Path | None = None
    """Folder to which files of ``folder`` are moved after they have been read; None: they stay where they are."""
    failed: Path | None = None
    """Folder to which files that cannot be read are moved, each with a ``.reason.txt`` next to it; None: they stay."""
    settle_seconds: Annotated[float, Field(gt=0, le=3_600)] = 2.0
    """A file is complete when its size and modification time have not changed for so long."""
    scan_seconds: Annotated[float, Field(gt=0, le=3_600)] = 2.0
    """The interval at which ``folder`` is scanned."""

    members: dict[Tag, list[Member]] = {}
    """Members of each tag, by e-mail address. (``user:ada@example.org`` always has Ada as its only member.)"""
    members_file: Path | None = None
    """Further members, in a TOML file that is read whenever it is needed: ``[members]``, then ``staff =
    ["ada@example.org"]``."""
    page_size: Annotated[int, Field(ge=1, le=50)] = 20
    """The number of documents in one page of a full read."""

    @model_validator(mode="after")
    def _require_separate_folders(self) -> Self:
        for name in ("done", "failed", "store"):
            path = getattr(self, name)
            # Without following links, because a mount whose server is away does not answer.
            if self.folder and path and Path(os.path.abspath(path)).is_relative_to(os.path.abspath(self.folder)):
                raise ValueError(
                    f"{name} is inside folder, so its files would be uploaded again: choose another folder"
                )
        return self

    def members_by_tag(self) -> dict[str, list[str]]:
        """Return the members of each tag, in lower case. Raises Misconfigured."""
        members = {tag: list(names) for tag, names in self.members.items()}
        if self.members_file is not None:
            try:
                file = _MembersFile.model_validate(tomllib.loads(self.members_file.read_text("utf-8")))
            except (OSError, ValueError, ValidationError) as error:  # TOMLDecodeError is a ValueError
                raise Misconfigured(
                    f"members_file {self.members_file}: cannot be read as [members] tag = [addresses]"
                    f" ({type(error).__name__})"
                ) from error
            for tag, names in file.members.items():
                members[tag] = [*members.get(tag, []), *names]
        return {tag: sorted({name.lower() for name in names}) for tag, names in members.items()}


class _MembersFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    members: dict[Tag, list[Member]]
