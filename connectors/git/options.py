"""The options of a git source: the repository, which files are read, and who may read them."""

from __future__ import annotations

import re
import string
import tomllib
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from connectors.folder.patterns import compiled, selects
from pipeline.core.errors import Misconfigured
from topics.fields import AclTags, Member, RequiredTags, Tag

_HOST = r"(?:[A-Za-z0-9_][A-Za-z0-9_.\-]*|\[[0-9A-Fa-f:]+\])(?::\d{1,5})?"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*@"
_URL = re.compile(
    rf"https://{_HOST}/[^\s\x00-\x1f]+|ssh://(?:{_USER})?{_HOST}/[^\s\x00-\x1f]+|{_USER}{_HOST}:[^\s\x00-\x1f:][^\s\x00-\x1f]*"
    r"|file:///[^\x00-\x1f]+"
)
"""The four kinds of addresses that are accepted. Others that git understands (``ext::``, ``git://``, plain http, other
helpers) run commands, or transfer data unencrypted."""
_BRANCH = re.compile(r"(?![/.\-])(?!.*(?:\.\.|//|@\{|[\x00-\x20\x7f~^:?*\[\\]))[^\x00]{1,200}(?<![/.])")
DEFAULT_EXCLUDE = (
    ".*",
    "node_modules/",
    "__pycache__/",
    "*.lock",
    "package-lock.json",
    "*.min.js",
    "*.min.css",
    "*.map",
)
"""Hidden files, and files that tools install or generate."""


class Rule(BaseModel):
    """The access of the files that match any of its patterns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paths: list[str] = Field(min_length=1)
    """Patterns with the syntax of ``include``."""
    acl_tags: AclTags
    """A reader of these files needs any of these tags. Empty: nobody may read them."""
    required_tags: RequiredTags = []
    """Tags that every reader of these files must hold as well."""

    def match(self, path: str) -> bool:
        return any(compiled(pattern).fullmatch(path) for pattern in self.paths)


class Access(BaseModel):
    """The access of files, and the members of tags. Git has none: who may fetch a repository has all of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    acl_tags: AclTags
    """Access of every file that no rule matches. Empty: nobody may read it."""
    required_tags: RequiredTags = []
    members: dict[Tag, list[Member]] = {}
    """Members of the tags that do not begin with ``user:``."""
    rules: list[Rule] = []
    """Only the last rule that matches a file counts."""

    def tags_of(self, path: str) -> tuple[list[str], list[str]]:
        """Return the acl_tags and required_tags of a file."""
        rule: Rule | Access = next((rule for rule in reversed(self.rules) if rule.match(path)), self)
        return rule.acl_tags, rule.required_tags

    def tags(self) -> set[str]:
        """Return all tags that are used."""
        lists = [self.acl_tags, self.required_tags]
        lists += [tags for rule in self.rules for tags in (rule.acl_tags, rule.required_tags)]
        return {tag for tags in lists for tag in tags}


class GitOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """``https://host/path``, ``ssh://user@host/path``, ``user@host:path`` or ``file:///path``."""
    branch: str | None = None
    """None: the branch that the remote's HEAD names."""
    token: SecretStr | None = None
    """For https: a deploy or access token that may read this repository and nothing else."""
    username: str = Field("x-access-token", pattern=r"^[^:\s\x00-\x1f]{1,200}$")
    """Sent with the token. GitHub and GitLab accept any for most kinds of token; Bitbucket requires
    ``x-token-auth``."""
    ssh_key_file: Path | None = None
    """The private key for ssh."""
    known_hosts_file: Path | None = None
    """The host's public keys; nothing is fetched over ssh from a host that is not in it."""
    ca_file: Path | None = None
    """Certificates of a company's own authority, for https."""

    include: list[str] = []
    """Patterns (``docs/**``, ``*.md``); empty: everything that is not excluded."""
    exclude: list[str] = list(DEFAULT_EXCLUDE)
    """Patterns of files that are not read."""

    acl_tags: AclTags = []
    """Access of every file that no rule matches. Empty: nobody may read it."""
    required_tags: RequiredTags = []
    """Tags that every reader of these files must hold as well."""
    members: dict[Tag, list[Member]] = {}
    """Members of the tags that do not begin with ``user:``."""
    rules: list[Rule] = []
    """Other access for files that match a pattern. Only the last rule that matches a file counts."""
    access_file: Path | None = None
    """A TOML file with ``acl_tags``, ``required_tags``, ``members`` and ``rules``, instead of these options. It is read
    again at every page and sweep. It is not in the repository, so that users who may push cannot change access."""

    source_url: str | None = None
    """Address at which a person opens a file, with ``{path}`` and optionally ``{branch}``."""
    authors: bool = True
    """Whether to walk the history for each file's last author and time. Takes a minute for 100,000 commits."""
    webhook_secret: SecretStr | None = None
    """The secret that signs events; None: events are refused."""
    max_repository_bytes: int = Field(4 * 1024**3, ge=1024)
    """Largest mirror on disk, including all history."""
    max_memory_bytes: int = Field(1024**3, ge=64 * 1024**2)
    """The most memory of one git process. A repository with millions of objects needs more."""
    max_files: int = Field(500_000, ge=1)
    """The most files of a commit, with links and submodules. Their paths are held in memory (about 0.5 KiB each), and
    may have 200 bytes on average."""
    max_file_bytes: int = Field(50_000_000, ge=1)
    """Largest file that is read."""
    page_documents: int = Field(50, ge=1, le=50)
    """The number of documents in one page of a full read."""
    fetch_seconds: float = Field(1800.0, gt=0)
    """Longest fetch, including the first one of everything."""

    @field_validator("url")
    @classmethod
    def _is_accepted_url(cls, url: str) -> str:
        if not _URL.fullmatch(url):
            raise ValueError(
                "write https://host/path, ssh://user@host/path, user@host:path or file:///path;"
                " without a password (the token is a separate option)"
            )
        return url

    @field_validator("branch")
    @classmethod
    def _is_branch_name(cls, branch: str | None) -> str | None:
        if branch is not None and not _BRANCH.fullmatch(branch):
            raise ValueError("is not the name of a branch")
        return branch

    @field_validator("source_url")
    @classmethod
    def _is_url_template(cls, template: str | None) -> str | None:
        if template is None:
            return None
        fields = {name for _, name, *_ in string.Formatter().parse(template) if name is not None}
        if "path" not in fields or fields - {"path", "branch"} or not template.startswith(("https://", "http://")):
            raise ValueError("write an https address with {path}, and {branch} if needed")
        return template

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.access_file and (self.acl_tags or self.required_tags or self.members or self.rules):
            raise ValueError("access_file replaces acl_tags, required_tags, members and rules: set one or the other")
        if self.token and not self.url.startswith("https://"):
            raise ValueError("token is for https addresses; for ssh set ssh_key_file")
        return self

    @property
    def is_ssh(self) -> bool:
        return not self.url.startswith(("https://", "file://"))

    def selects(self, path: str) -> bool:
        return selects(path, self.include, self.exclude)

    def access(self) -> Access:
        """Return the current access. Blocks. Raises Misconfigured, which leaves the published access as it is."""
        if self.access_file is None:
            return Access(
                acl_tags=self.acl_tags, required_tags=self.required_tags, members=self.members, rules=self.rules
            )
        try:
            return Access.model_validate(tomllib.loads(self.access_file.read_text("utf-8")))
        except OSError as error:
            raise Misconfigured(f"access_file {self.access_file}: cannot be read ({error.strerror})") from error
        except ValidationError as error:
            first_error = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first_error["loc"]))
            raise Misconfigured(f"access_file {self.access_file}: {field}: {first_error['msg']}") from error
        except ValueError as error:
            raise Misconfigured(f"access_file {self.access_file}: is not TOML in UTF-8 ({error})") from error


def environment(options: GitOptions, home: Path, path: str) -> Mapping[str, str]:
    """Return the whole environment of the git command. home: an empty folder. path: PATH.

    Credentials are passed here, where only this user's processes see them, and not in arguments or addresses.
    """
    config = {
        "core.hooksPath": "/dev/null",
        "core.fsmonitor": "false",
        "core.symlinks": "false",
        "core.quotePath": "false",
        "credential.helper": "",
        "fetch.recurseSubmodules": "false",
        "submodule.recurse": "false",
        "fetch.showForcedUpdates": "false",
        "transfer.bundleURI": "false",
        "gc.autoDetach": "false",
        "gc.auto": "2000",
        "http.followRedirects": "false",  # the token must not be sent to another host
        "http.lowSpeedLimit": "1000",
        "http.lowSpeedTime": "60",
        "protocol.allow": "never",
        "diff.renameLimit": "5000",
        "core.bigFileThreshold": "64m",
        "pack.threads": "2",
        "pack.windowMemory": "64m",
    }
    config |= {f"protocol.{name}.allow": "always" for name in ("https", "ssh", "file")}
    if options.ca_file:
        config["http.sslCAInfo"] = str(options.ca_file)
    if options.token:
        origin = "/".join(options.url.split("/")[:3])
        config[f"http.{origin}/.extraHeader"] = f"Authorization: Basic {basic(options.username, options.token)}"
    variables = {
        "PATH": path,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "LANGUAGE": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "",
        "SSH_ASKPASS": "",
        "GIT_ALLOW_PROTOCOL": "https:ssh:file",
        "GIT_PROTOCOL_FROM_USER": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_SSH_VARIANT": "ssh",
        "GIT_SSH_COMMAND": ssh_command(options),
        "GIT_CONFIG_COUNT": str(len(config)),
    }
    for number, (key, value) in enumerate(config.items()):
        variables |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return variables


def basic(username: str, token: SecretStr) -> str:
    """Return the credentials of HTTP Basic authentication (RFC 7617)."""
    return b64encode(f"{username}:{token.get_secret_value()}".encode()).decode()


def ssh_command(options: GitOptions) -> str:
    settings = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "IdentitiesOnly": "yes",
        "ConnectTimeout": "20",
        "PermitLocalCommand": "no",
        "ProxyCommand": "none",
        "ClearAllForwardings": "yes",
        "UserKnownHostsFile": f'"{options.known_hosts_file or "/dev/null"}"',
        "GlobalKnownHostsFile": "/dev/null",
    }
    parts = ["ssh", "-F", "none", "-i", str(options.ssh_key_file or "/dev/null")]
    parts += [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    return " ".join(map(quote, parts))
