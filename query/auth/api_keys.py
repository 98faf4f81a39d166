"""Services and their credentials: a file with the SHA-256 digests of their API keys, which is read again whenever it
changes, and the people on whose behalf each may ask."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

import structlog
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from jwt import PyJWK
from jwt.algorithms import get_default_algorithms
from jwt.exceptions import PyJWTError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.core.addresses import is_https_or_local
from pipeline.core.errors import Misconfigured
from pipeline.runtime.credentials import KeyExpiry
from query.auth.identity import Identity, Scope
from query.auth.tokens import Untrusted
from query.model import CallerClass
from query.settings import Algorithm

log = structlog.get_logger()

_HEX = re.compile(r"[0-9a-f]{64}")
_Signature = tuple[int, int, int]
MAX_ASSERTION_HOURS = 1 / 6
"""The longest validity of a token by which a service names a person, from ``iat`` to ``exp``."""
LEEWAY_SECONDS = 30.0
"""How far the clock of a service's issuer may differ from ours."""


class Delegation(BaseModel):
    """``[name.acts_for]``: for whom a service may ask, and who vouches for these people."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    issuer: str | None = Field(None, min_length=1)
    """The ``iss`` of the tokens that name the person. They are signed for this service's requests, and are valid for at
    most ten minutes."""
    audience: str = Field("penstock", min_length=1)
    """Their ``aud``."""
    algorithms: tuple[Algorithm, ...] = ("RS256", "ES256", "EdDSA")
    """Their accepted signature algorithms."""
    public_key: str | None = None
    """The issuer's public key in PEM."""
    jwks_url: str | None = None
    """Instead of public_key: the address at which the issuer publishes its keys: https, or http on loopback."""
    principal_claim: str = Field("sub", min_length=1)
    """The claim that holds the principal, as `identities.v1` names it. ``email`` counts with ``email_verified``."""
    scopes: tuple[Scope, ...] = ("search", "answers")
    """The parts of the API that the service may use on behalf of people."""
    principals: tuple[str, ...] = ("*",)
    """The people: names or patterns such as ``*@acme.example``; capitals count."""
    tenants: tuple[str, ...] = ()
    """Tenants besides the entry's own; a token names one of them in its claim ``tenant``."""

    @property
    def leeway_seconds(self) -> float:
        return LEEWAY_SECONDS

    @property
    def max_token_hours(self) -> float:
        return MAX_ASSERTION_HOURS

    @model_validator(mode="after")
    def _can_be_checked(self) -> Delegation:
        named = [name for name in ("public_key", "jwks_url") if getattr(self, name) is not None]
        if len(named) != (self.issuer is not None):
            raise ValueError("set issuer and one of public_key and jwks_url, or none of them for an actor")
        if self.public_key is not None:
            public_key(self.public_key)
        if self.jwks_url is not None and not is_https_or_local(self.jwks_url):
            raise ValueError("jwks_url must begin with https:// (http only on this machine)")
        return self


@dataclass(frozen=True, slots=True)
class OneKey:
    """The public key of an issuer that has one."""

    pem: str

    async def key(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """The key for this algorithm, whatever its ``kid``; None: it is of another kind."""
        del kid
        try:
            return PyJWK(get_default_algorithms()[algorithm].to_jwk(public_key(self.pem), as_dict=True), algorithm)
        except (PyJWTError, TypeError, AttributeError, KeyError):
            return None


def public_key(pem: str) -> PublicKeyTypes:
    """Raises ValueError for a text that is not a public key."""
    try:
        return load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError("public_key is not a public key in PEM") from error


class Entry(BaseModel):
    """One service: ``[name]`` in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str | None = Field(None, pattern=_HEX.pattern, min_length=64, max_length=64)
    """The output of ``printf %s KEY | sha256sum``. A key has at least 32 random characters; only digests are
    compared."""
    expires: KeyExpiry | None = None
    """The key is refused from then on. To replace a key, add a second entry, change the service and delete the
    first."""
    actor: str | None = Field(None, min_length=1)
    """Instead of a key: the ``sub`` of the claim ``act`` in tokens that the identity provider exchanged for this
    service."""
    acts_for: Delegation | None = None
    """The people on whose behalf the service may ask. None: nobody."""
    tenant: str = Field(min_length=1)
    principal: str | None = Field(None, min_length=1)
    tags: tuple[str, ...] = ()
    caller_class: CallerClass = Field("standard", alias="class")
    operator: bool = False

    @model_validator(mode="after")
    def _has_credential(self) -> Entry:
        if (self.sha256 is None) == (self.actor is None):
            raise ValueError("set either sha256 or actor")
        if self.sha256 is not None and self.expires is None:
            raise ValueError("set expires: a key without it is refused")
        if self.actor is not None:
            if self.acts_for is None:
                raise ValueError("set acts_for, or the actor can read nothing")
            if self.acts_for.issuer is not None or self.principal or self.tags or self.operator or self.expires:
                raise ValueError("an actor has tenant, class and acts_for (scopes, principals, tenants) alone")
        elif self.acts_for is not None and self.acts_for.issuer is None:
            raise ValueError("set issuer and one of public_key and jwks_url in acts_for")
        return self

    @model_validator(mode="after")
    def _has_access(self) -> Entry:
        if self.principal is not None and self.tags:
            raise ValueError("set either principal or tags, not both")
        if not self.has_own_access and self.acts_for is None:
            raise ValueError("set principal or tags, or the key can read nothing")
        return self

    @property
    def has_own_access(self) -> bool:
        """Whether the service may also ask for itself."""
        return self.principal is not None or bool(self.tags) or self.operator

    def identity(self, name: str) -> Identity:
        """The service itself. name: the entry's."""
        return Identity("key", self.tenant, self.principal, self.tags, self.caller_class, self.operator, name)

    def on_behalf(self, name: str, tenant: str, principal: str) -> Identity:
        """The identity of a person for whom this service asks. name: the entry's. Raises Untrusted when the service may
        not ask for this person."""
        assert self.acts_for is not None
        if tenant != self.tenant and tenant not in self.acts_for.tenants:
            raise Untrusted(f"{name} may not ask on behalf of people of this tenant")
        if not any(fnmatchcase(principal, pattern) for pattern in self.acts_for.principals):
            raise Untrusted(f"{name} may not ask on behalf of this person")
        return Identity(
            "delegated", tenant, principal, caller_class=self.caller_class, key=name, scopes=self.acts_for.scopes
        )


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

    def actor(self, actor: str) -> tuple[str, Entry] | None:
        """The name and the entry of a service to which the identity provider delegates; None: it is not enrolled.
        Raises Misconfigured while the file cannot be read."""
        return next(((name, entry) for name, entry in self._current().items() if entry.actor == actor), None)

    def permits(self, identity: Identity, key: str | None) -> bool:
        """Whether the file still gives this identity to the service that it was given to. key: the service's API key;
        None: it is an actor. Raises Misconfigured while the file cannot be read."""
        assert identity.key is not None
        if key is None:
            named = self._current().get(identity.key)
            match = None if named is None or named.actor is None else (identity.key, named)
        else:
            match = self.entry(key)
        if match is None or match[0] != identity.key:
            return False
        name, entry = match
        if identity.kind != "delegated" or identity.principal is None:
            return entry.has_own_access and entry.identity(name) == identity
        try:
            return entry.acts_for is not None and entry.on_behalf(name, identity.tenant, identity.principal) == identity
        except Untrusted:
            return False

    def entry(self, key: str) -> tuple[str, Entry] | None:
        """The name and the entry that this key belongs to; None if the key is unknown or has expired. Raises
        Misconfigured while the file cannot be read."""
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
        match: tuple[str, Entry] | None = None
        for name, entry in self._current().items():  # all of them, in constant time
            if hmac.compare_digest(digest, entry.sha256 or ""):
                match = name, entry
        if match is None or match[1].expires is None or match[1].expires <= datetime.now(UTC):
            return None
        return match

    def _current(self) -> dict[str, Entry]:
        self._read()
        if self._entries is None:
            raise Misconfigured(f"PENSTOCK_AUTH_KEYS_FILE: {self._path}: {self._error}")
        return self._entries

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
        entries = (self._entries or {}).values()
        expiries = [entry.expires.timestamp() for entry in entries if entry.expires and entry.expires > now]
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
    for field in ("sha256", "actor"):
        values = [value for entry in entries.values() if (value := getattr(entry, field))]
        if len(set(values)) < len(values):
            raise ValueError(f"two entries have the same {field}")
    return entries
