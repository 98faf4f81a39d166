"""Services' API keys: a file of their SHA-256, read again whenever it changes."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.core.errors import Misconfigured
from pipeline.runtime.credentials import KeyExpiry
from query.auth.identity import Who
from query.model import CallerClass

log = structlog.get_logger()

_HEX = re.compile(r"[0-9a-f]{64}")
_Signature = tuple[int, int, int]


class Entry(BaseModel):
    """One service: ``[name]`` in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=_HEX.pattern, min_length=64, max_length=64)
    """``printf %s KEY | sha256sum``. A key is at least 32 random characters: its hash is all that is compared."""
    expires: KeyExpiry
    """From then on the key is refused. To replace a key, add a second entry, change the service, drop the first."""
    tenant: str = Field(min_length=1)
    principal: str | None = Field(None, min_length=1)
    tags: tuple[str, ...] = ()
    caller_class: CallerClass = Field("standard", alias="class")
    operator: bool = False

    @model_validator(mode="after")
    def _reads_as_somebody(self) -> Entry:
        if self.principal is not None and self.tags:
            raise ValueError("set either principal or tags, not both")
        if self.principal is None and not self.tags and not self.operator:
            raise ValueError("set principal or tags: this key could read nothing")
        return self


class KeyFile:
    """The keys as the file has them now. A file that cannot be read opens for nobody: which keys it took away is not
    known."""

    def __init__(self, path: Path) -> None:
        """Raises Misconfigured when it cannot be read."""
        self._path = path
        self._seen: _Signature | None = None
        self._entries: dict[str, Entry] | None = None
        self._error = ""
        self._read()
        if self._entries is None:
            raise Misconfigured(f"PENSTOCK_AUTH_KEYS_FILE: {path}: {self._error}")

    def who(self, key: str) -> Who | None:
        """The service that holds this key; None: nobody, or it has expired. Raises Misconfigured while the file cannot
        be read."""
        self._read()
        if self._entries is None:
            raise Misconfigured(f"PENSTOCK_AUTH_KEYS_FILE: {self._path}: {self._error}")
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
        match: tuple[str, Entry] | None = None
        for name, entry in self._entries.items():  # each in constant time, and all: how long it takes tells nothing
            if hmac.compare_digest(digest, entry.sha256):
                match = name, entry
        if match is None or match[1].expires <= datetime.now(UTC):
            return None
        name, entry = match
        return Who("key", entry.tenant, entry.principal, entry.tags, entry.caller_class, entry.operator, name)

    def _read(self) -> None:
        before = self._error
        try:
            stat = self._path.stat()
            signature = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if signature == self._seen:
                return
            self._seen, self._entries, self._error = signature, None, ""
            self._entries = parse(self._path.read_text())
        except OSError as error:
            self._seen, self._entries, self._error = None, None, error.strerror or "cannot be read"
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            self._error = "not valid TOML"
        except ValueError as error:
            self._error = str(error)
        if self._entries is None:
            if self._error != before:  # a file that is gone is looked for at every request
                log.error("keys_file_unreadable", path=str(self._path), error=self._error)
        else:
            log.info("keys_file_read", path=str(self._path), keys=len(self._entries))

    @property
    def next_expiry(self) -> float:
        """When the first key that is still valid ends, in seconds since the epoch; 0: there is none."""
        now = datetime.now(UTC)
        ends = [entry.expires.timestamp() for entry in (self._entries or {}).values() if entry.expires > now]
        return min(ends, default=0.0)


def parse(text: str) -> dict[str, Entry]:
    """Raises ValueError (TOMLDecodeError, ValidationError among them) that names the entry and never a hash."""
    entries = {}
    for name, fields in tomllib.loads(text).items():
        try:
            entries[name] = Entry.model_validate(fields)
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(str(part) for part in (name, *problem["loc"]))
            raise ValueError(f"{where}: {problem['msg']}") from error
    if len({entry.sha256 for entry in entries.values()}) < len(entries):
        raise ValueError("two entries have the same sha256")
    return entries
