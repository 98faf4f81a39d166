"""The identity of an authenticated caller."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_bytes

from query.model import CallerClass

_SALT = token_bytes(16)


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated caller. Its access is looked up at each request (``Search.identify``), because groups change."""

    kind: str
    """token, key or development."""
    tenant: str
    principal: str | None
    """None: a service with fixed tags."""
    tags: tuple[str, ...] = ()
    caller_class: CallerClass = "standard"
    operator: bool = False
    key: str | None = None
    """The name of an API key."""

    @property
    def id(self) -> tuple[str, ...]:
        """The key of the caller's limits."""
        return (self.kind, self.tenant, self.key or "", self.principal or "")

    @property
    def log_name(self) -> str:
        """The API key's name, or a salted digest that distinguishes principals within this process."""
        if self.key is not None:
            return self.key
        return blake2b("\0".join(self.id).encode(errors="replace"), digest_size=6, key=_SALT).hexdigest()

    @property
    def principals(self) -> tuple[str, ...]:
        return () if self.principal is None else (self.principal,)
