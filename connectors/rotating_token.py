"""Access tokens of OAuth whose refresh token is replaced by each use.

The newest refresh token is the only credential that stays valid, so it is stored, in the source's memory, before its
access token is used. All processes of an instance share it: one that finds a newer token uses that, and does not
exchange its own. It is sealed with a key that is derived from the client's secret.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

from connectors.sealed import SealedCredential
from connectors.source import Memory
from connectors.web.token import TOKEN_MARGIN_SECONDS, RenewedToken
from pipeline.core.errors import Misconfigured


@dataclass(frozen=True, slots=True, repr=False)
class Grant:
    """A pair of tokens."""

    access: str
    refresh: str
    expires_at: float
    """When the access token expires, in seconds since 1970."""


class Unaccepted(Exception):
    """The service does not accept a refresh token."""


Exchange = Callable[[str], Awaitable[Grant]]
"""Exchanges a refresh token for a pair of tokens. Raises Unaccepted, and the errors of ``request_token``."""


class RotatingToken(RenewedToken):
    """Law: a pair of tokens is stored before it is used, and no refresh token is exchanged while a newer one is
    stored."""

    def __init__(
        self,
        memory: Memory,
        first: str,
        secret: str,
        exchange: Exchange,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        """first: the refresh token of the settings, with which everything begins. secret: the client's, from which the
        key is derived. now: seconds since 1970."""
        super().__init__()
        self._first = first
        self._stored = SealedCredential(memory, first, secret, b"penstock oauth")
        self._exchange = exchange
        self._now = now
        self._used = ""
        """The access token that was returned last: where it is requested again, it was refused or expires."""
        self._unstored: Grant | None = None
        """A pair that could not be stored: nothing else is valid any more."""

    async def request_token(self) -> tuple[str, float]:
        grant = self._unstored or await self._load()
        if self._unstored is not None:
            await self._store(self._unstored)
        if grant is None or not self._is_usable(grant):
            grant = await self._renew(grant)
        self._used = grant.access
        return grant.access, grant.expires_at - self._now()

    async def _renew(self, grant: Grant | None) -> Grant:
        refresh = self._first if grant is None else grant.refresh
        try:
            renewed = await self._exchange(refresh)
        except Unaccepted as error:
            newer = await self._load()
            if newer is not None and newer.refresh != refresh:  # another process was faster
                if self._is_usable(newer):
                    return newer
                return await self._renew(newer)
            raise Misconfigured(
                "the refresh token is not accepted: it was revoked, or not used for too long; authorize the app again,"
                " and set the new refresh_token"
            ) from error
        await self._store(renewed)
        return renewed

    def _is_usable(self, grant: Grant) -> bool:
        return grant.access != self._used and grant.expires_at - self._now() > TOKEN_MARGIN_SECONDS

    async def _load(self) -> Grant | None:
        """Return the stored pair; None: none that follows from the refresh token of the settings."""
        stored = await self._stored.load()
        try:
            return None if stored is None else Grant(**stored)
        except TypeError:
            return None  # of another version

    async def _store(self, grant: Grant) -> None:
        self._unstored = grant
        await self._stored.store(asdict(grant))
        self._unstored = None
