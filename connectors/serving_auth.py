"""Who calls our HTTP side: services, each with a bearer key of which the settings hold only the SHA-256."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Header, HTTPException

from connectors.declared import Key, Way

SCHEME = "bearer "


def tenant_for(way: Way, keys: Mapping[str, Key]) -> Callable[..., str]:
    """A FastAPI dependency: the tenant of a caller who may use this way in. 401: no key, or none of ours; 403: a key
    that may not."""

    def tenant(authorization: Annotated[str | None, Header()] = None) -> str:
        given = authorization or ""
        if given[: len(SCHEME)].lower() != SCHEME:
            raise HTTPException(401, "send Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})
        found = _known(given[len(SCHEME) :].strip(), keys)
        if found is None:
            raise HTTPException(401, "this key is not known, or it has expired", {"WWW-Authenticate": "Bearer"})
        if way not in found.may:
            raise HTTPException(403, f"this key may not use {way}")
        return found.tenant

    return tenant


def _known(given: str, keys: Mapping[str, Key]) -> Key | None:
    """Every hash is compared, each in constant time: how long it takes tells nothing."""
    digest = hashlib.sha256(given.encode()).hexdigest()
    found = None
    for key in keys.values():
        if hmac.compare_digest(digest, key.sha256):
            found = key
    return found if found is not None and found.expires > datetime.now(UTC) else None
