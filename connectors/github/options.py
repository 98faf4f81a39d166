"""The options of an instance of GitHub."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, field_validator, model_validator

from pipeline.core.addresses import is_https_or_local
from pipeline.core.errors import Misconfigured

Kind = Literal["issues", "pull_requests", "discussions"]
Wikis = Literal["wikis"]
Pattern = Annotated[str, StringConstraints(to_lower=True, pattern=r"^[A-Za-z0-9-]{1,100}/[A-Za-z0-9_.*?-]{1,100}$")]
Login = Annotated[str, StringConstraints(to_lower=True, pattern=r"^[A-Za-z0-9-]{1,100}$")]
OWN_PREFIXES = ("repository:", "organization:")
"""The beginnings of the tags that the source itself makes."""


class GitHubOptions(BaseModel):
    """``repositories`` and ``organization`` together say what is read; at least one is required. The credential is
    either ``token``, or ``app_id``, ``installation_id`` and ``private_key`` of a GitHub App."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    token: SecretStr | None = None
    """A fine-grained personal access token."""
    app_id: int | None = None
    """The id of a GitHub App; its client id is not accepted."""
    installation_id: int | None = None
    """The id of the App's installation: the number at the end of the installation's address."""
    private_key: SecretStr | None = None
    """The App's private key (PEM), or the path of the file that holds it."""
    api_url: str = "https://api.github.com"
    """The address of the REST API. GitHub Enterprise Server: ``https://HOST/api/v3``."""
    webhook_secret: SecretStr | None = None
    """The secret that signs events. None: every event is refused."""

    repositories: tuple[Pattern, ...] = ()
    """``owner/name``; the name may contain the wildcards ``*`` and ``?``."""
    organization: Login | None = None
    """An organisation of which every repository that the credential sees is read."""
    exclude: tuple[Pattern, ...] = ()
    """Repositories that are never read, in the same form as ``repositories``."""
    kinds: tuple[Kind | Wikis, ...] = ("issues", "pull_requests", "discussions")
    """The kinds of documents to read. ``wikis`` are read with git, and only if they are named here: the credential then
    needs the permission to read the repositories' files, too."""
    max_wikis_bytes: int = Field(default=4 * 1024**3, ge=1024)
    """The most that the mirrors of all wikis together take on disk, with their whole histories."""
    web_url: str | None = None
    """The address of the website, below which git reads wikis. None: it follows from ``api_url``."""
    ca_file: Path | None = None
    """Certificates of a company's own authority, for git."""

    people: Mapping[str, str] = {}
    """The e-mail addresses of people by their GitHub login. They take precedence over what GitHub says."""
    people_file: Path | None = None
    """A TOML file of lines ``login = "address"``, read anew every time; it takes precedence over ``people``."""
    public_acl_tags: tuple[str, ...] = ()
    """Tags whose holders may read documents of public repositories, in addition to the collaborators."""
    members: Mapping[str, list[str]] = {}
    """The principals that hold each tag of ``public_acl_tags``. A tag ``user:ADDRESS`` needs none."""

    page_size: int = Field(default=20, ge=1, le=50)
    """Documents on a page with their texts. GitHub ends a request that takes longer than ten seconds."""
    sweep_page_size: int = Field(default=100, ge=1, le=100)
    """Documents on a page of a listing without texts."""
    overlap_seconds: int = Field(default=300, ge=0, le=86_400)
    """How far each poll overlaps the one before, for a clock that differs from GitHub's."""

    @field_validator("api_url", "web_url")
    @classmethod
    def _is_https(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if not is_https_or_local(url):
            raise ValueError("is not an https address: the token would be sent unencrypted")
        return url.rstrip("/")

    @field_validator("public_acl_tags")
    @classmethod
    def _are_free(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if any(tag.startswith(OWN_PREFIXES) for tag in tags):
            raise ValueError("a tag begins with repository: or organization:, which this source uses: rename it")
        return tags

    @model_validator(mode="after")
    def _is_complete(self) -> GitHubOptions:
        app = (self.app_id, self.installation_id, self.private_key)
        if self.token is None and None in app:
            raise ValueError("no credential: set token, or app_id, installation_id and private_key")
        if self.token is not None and any(part is not None for part in app):
            raise ValueError("two credentials: set either token, or app_id, installation_id and private_key")
        if not self.repositories and self.organization is None:
            raise ValueError("nothing to read: name repositories, or an organization")
        if "wikis" in self.kinds and not self.website.startswith("https://"):
            raise ValueError("wikis are read over https: set web_url to the website's address")
        return self

    @property
    def graphql_url(self) -> str:
        """The address of the GraphQL API."""
        return self.api_url.removesuffix("/v3") + "/graphql"

    @property
    def website(self) -> str:
        """The address of the website: of ``https://api.HOST`` and of ``https://HOST/api/v3``, ``https://HOST``."""
        if self.web_url is not None:
            return self.web_url
        parts = urlsplit(self.api_url)
        return f"{parts.scheme}://{parts.netloc.removeprefix('api.')}"

    @property
    def named(self) -> tuple[str, ...]:
        """The names in ``repositories`` without wildcards."""
        return tuple(name for name in self.repositories if not _has_wildcard(name))

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners whose repositories have to be listed."""
        owners = {name.partition("/")[0] for name in self.repositories if _has_wildcard(name)}
        return tuple(sorted(owners | ({self.organization} if self.organization else set())))

    def is_selected(self, name: str) -> bool:
        """Whether the settings select a repository by its current name ``owner/name``."""
        name = name.lower()
        if self.is_excluded(name):
            return False
        if self.organization is not None and name.partition("/")[0] == self.organization:
            return True
        return any(fnmatchcase(name, pattern) for pattern in self.repositories)

    def is_excluded(self, name: str) -> bool:
        return any(fnmatchcase(name.lower(), pattern) for pattern in self.exclude)

    def addresses(self) -> dict[str, str]:
        """Return the configured addresses by login, both in lower case. Blocks. Raises Misconfigured."""
        people = dict(self.people)
        if self.people_file is not None:
            try:
                people |= tomllib.loads(self.people_file.read_text("utf-8"))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise Misconfigured(f"{self.people_file} cannot be read ({type(error).__name__})") from error
        if not all(isinstance(address, str) and "@" in address for address in people.values()):
            raise Misconfigured('people: write login = "address" for each person')
        return {login.lower(): address.strip().lower() for login, address in people.items()}


def _has_wildcard(name: str) -> bool:
    return "*" in name or "?" in name
