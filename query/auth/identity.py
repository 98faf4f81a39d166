"""The identity of an authenticated caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_bytes
from typing import Literal

from query.model import CallerClass

_SALT = token_bytes(16)

Scope = Literal["search", "answers", "history", "documents", "feedback", "previews", "mcp"]
PATHS: Mapping[Scope, tuple[str, ...]] = {
    "search": ("/v1/search", "/v1/facets"),
    "answers": ("/v1/answers", "/v1/standing"),
    "documents": ("/v1/documents", "/v1/conflicts"),
    "feedback": ("/v1/feedback",),
    "previews": ("/v1/previews",),
    "mcp": ("/mcp",),
}
"""The paths of each scope. ``history`` is a field of a question, not a path."""
ALWAYS = frozenset({"/v1/me"})


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated caller. Its access is looked up at each request (``Search.identify``), because groups change."""

    kind: str
    """token, key, delegated or development."""
    tenant: str
    principal: str | None
    """None: a service with fixed tags."""
    tags: tuple[str, ...] = ()
    caller_class: CallerClass = "standard"
    operator: bool = False
    key: str | None = None
    """The name of the service: of its API key, or of its entry as an actor."""
    scopes: tuple[Scope, ...] | None = None
    """The parts of the API that a service may use on behalf of this person. None: all of them."""

    def may_use(self, path: str) -> bool:
        """Whether a request to this path is within the scopes."""
        if self.scopes is None or path in ALWAYS:
            return True
        allowed = (beginning for scope in self.scopes for beginning in PATHS.get(scope, ()))
        return any(path == beginning or path.startswith(f"{beginning}/") for beginning in allowed)

    def has(self, scope: Scope) -> bool:
        return self.scopes is None or scope in self.scopes

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
