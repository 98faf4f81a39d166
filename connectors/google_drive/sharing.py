"""Reads who may read files: from the file itself where it says so, else by as few questions as are exact."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime

from connectors.google_drive.access import NOBODY, Access, Sharing, own_access, shared_access
from connectors.google_drive.api import Api, Json
from connectors.web import Denied, Missing, Rejected

Key = tuple[object, ...]


class Vanished(Exception):
    """The file was there a moment ago."""


class Readers:
    """Good for one page: what was read for one file serves others that must have the same, and no longer."""

    def __init__(self, api: Api, sharing: Sharing, now: Callable[[], datetime], unknown: Callable[[], None]) -> None:
        """unknown: told of a file whose sharing the account may not see."""
        self._api = api
        self._sharing = sharing
        self._now = now
        self._unknown = unknown
        self._read: dict[Key, list[Json]] = {}
        self._reading: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, file: Json) -> Access:
        """Raises Vanished."""
        drive = file.get("driveId")
        if not drive:
            if "permissions" not in file:  # Google shows them to those only who may share the file
                self._unknown()
                return NOBODY
            return own_access(file["permissions"], self._sharing, self._now())
        try:
            permissions = await self._list(str(file["id"]), self._key(file))
            members = await self._list(str(drive), ("drive", drive))
        except Missing as error:
            raise Vanished from error
        except (Denied, Rejected):
            self._unknown()
            return NOBODY
        return shared_access(file, permissions, members, str(drive), self._sharing, self._now())

    def _key(self, file: Json) -> Key:
        """Files of one folder that have no permissions of their own and are open to the same have the same ones, ends
        and origins included: all come down from that folder."""
        if file.get("hasAugmentedPermissions") is not False or not file.get("permissionIds"):
            return ("file", file["id"])
        return (
            "folder", file["driveId"], *(file.get("parents") or (file["id"],)),
            bool(file.get("inheritedPermissionsDisabled")), frozenset(file["permissionIds"]),
        )  # fmt: skip

    async def _list(self, id_: str, key: Key) -> Sequence[Json]:
        async with self._reading[key]:
            if key not in self._read:
                self._read[key] = await self._api.permissions(id_)
            return self._read[key]
