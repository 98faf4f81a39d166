"""How an instance of uploads is set, and how much all of them may hold."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict

from pipeline.core.errors import Misconfigured
from pipeline.runtime.settings import Part, explained
from topics.fields import AclTags, Member, RequiredTags, Tag


class UploadsQuota(Part):
    """Of uploads that are not deleted, in all instances of one database. 0: no limit. Build it with ``load()``."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_UPLOADS_", frozen=True, extra="forbid")

    tenant_bytes: int = Field(50_000_000_000, ge=0)
    tenant_files: int = Field(100_000, ge=0)
    """Of one tenant."""
    all_bytes: int = Field(200_000_000_000, ge=0)
    all_files: int = Field(500_000, ge=0)
    """Of all tenants together."""

    @classmethod
    def load(cls) -> Self:
        """Raises Misconfigured with one line that names the variable."""
        try:
            return cls()
        except ValidationError as error:
            raise explained(error) from error


class UploadsOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Path | None = None
    """Where the originals are kept; None: in the instance's folder. Of this instance alone."""
    max_bytes: Annotated[int, Field(ge=1, le=10**10)] = 50_000_000
    """Of a file. What is read of it has limits of its own (connectors.extraction)."""

    folder: Path | None = None
    """Files put into it are taken. None: HTTP only."""
    acl_tags: AclTags = []
    """Of files in ``folder`` of which no ``.penstock.toml`` says otherwise. Empty: such files are not taken."""
    required_tags: RequiredTags = []
    done: Path | None = None
    """Where files of ``folder`` are moved when they have been read; None: they stay where they are."""
    failed: Path | None = None
    """Where those are moved that could not be read, each with a ``.reason.txt`` beside it; None: they stay."""
    settle_seconds: Annotated[float, Field(gt=0, le=3_600)] = 2.0
    """A file is complete when its size and time have stood still for so long."""
    scan_seconds: Annotated[float, Field(gt=0, le=3_600)] = 2.0

    members: dict[Tag, list[Member]] = {}
    """Who holds a tag, by e-mail address. (``user:ada@example.org`` is held by Ada alone, without being told here.)"""
    members_file: Path | None = None
    """The same as a TOML file, read again each time: ``[members]``, then ``staff = ["ada@example.org"]``."""
    page_size: Annotated[int, Field(ge=1, le=50)] = 20

    @model_validator(mode="after")
    def _apart(self) -> Self:
        for name in ("done", "failed", "store"):
            path = getattr(self, name)
            if self.folder is not None and path is not None and path.resolve().is_relative_to(self.folder.resolve()):
                raise ValueError(f"{name} lies within folder: it would be taken again")
        return self

    def holders(self) -> dict[str, list[str]]:
        """tag → principals. Raises Misconfigured."""
        found = {tag: list(names) for tag, names in self.members.items()}
        if self.members_file is not None:
            try:
                given = _MembersFile.model_validate(tomllib.loads(self.members_file.read_text("utf-8")))
            except (OSError, ValueError, ValidationError) as error:  # TOMLDecodeError is a ValueError
                raise Misconfigured(
                    f"members_file {self.members_file}: cannot be read as [members] tag = [addresses]"
                    f" ({type(error).__name__})"
                ) from error
            for tag, names in given.members.items():
                found[tag] = [*found.get(tag, []), *names]
        return {tag: sorted({name.lower() for name in names}) for tag, names in found.items()}


class _MembersFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    members: dict[Tag, list[Member]]
