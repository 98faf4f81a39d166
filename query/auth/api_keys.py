"""API keys of services: a file of their SHA-256 digests, which is read again whenever it changes."""

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
from query.auth.identity import Identity
from query.model import CallerClass

log = structlog.get_logger()

_HEX = re.compile(r"[0-9a-f]{64}")
_Signature = tuple[int, int, int]


class Entry(BaseModel):
    """One service: ``[name]`` in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=_HEX.pattern, min_length=64, max_length=64)
    """The output of ``printf %s KEY | sha256sum``. A key has at least 32 random characters; only digests are
    compared."""
    expires: KeyExpiry
    """The key is refused from then on. To replace a key, add a second entry, change the service and delete the
    first."""
    tenant: str = Field(min_length=1)
    principal: str | None = Field(None, min_length=1)
    tags: tuple[str, ...] = ()
    caller_class: CallerClass = Field("standard", alias="class")
    operator: bool = False

    @model_validator(mode="after")
    def _has_access(self) -> Entry:
        if self.principal is not None and self.tags:
            raise ValueError("set either principal or tags, not both")
        if self.principal is None and not self.tags and not self.operator:
            raise ValueError("set principal or tags, or the key can read nothing")
        return self


class KeyFile:
    """The current keys of the file. While the file cannot be read, no key is accepted, because revoked keys are not
    known."""

    def __init__(self, path: Path) -> None:
        """Raises Misconfigured when the file cannot be read."""
        self._path = path
        self._seen: _Signature | None = None
        self._entries: dict[str, Entry] | None = None
        self._error = ""
        self._read()
        if self._entries is None:
            raise Misconfigured(f"PENSTOCK_AUTH_KEYS_FILE: {path}: {self._error}")

    def identify(self, key: str) -> Identity | None:
        """The service that this key belongs to; None if the key is unknown or has expired. Raises Misconfigured while
        the file cannot be read."""
        self._read()
        if self._entries is None:
            raise Misconfigured(f"PENSTOCK_AUTH_KEYS_FILE: {self._path}: {self._error}")
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
        match: tuple[str, Entry] | None = None
        for name, entry in self._entries.items():  # all of them, in constant time
            if hmac.compare_digest(digest, entry.sha256):
                match = name, entry
        if match is None or match[1].expires <= datetime.now(UTC):
            return None
        name, entry = match
        return Identity("key", entry.tenant, entry.principal, entry.tags, entry.caller_class, entry.operator, name)

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
            if self._error != before:  # log once: a missing file is checked at every request
                log.error("keys_file_unreadable", path=str(self._path), error=self._error)
        else:
            log.info("keys_file_read", path=str(self._path), keys=len(self._entries))

    @property
    def next_expiry(self) -> float:
        """When the next key expires, in seconds since the epoch; 0: no valid key."""
        now = datetime.now(UTC)
        expiries = [entry.expires.timestamp() for entry in (self._entries or {}).values() if entry.expires > now]
        return min(expiries, default=0.0)


def parse(text: str) -> dict[str, Entry]:
    """The entries of the file by name. Raises ValueError (such as TOMLDecodeError) that names the entry and never a
    digest."""
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
