"""A credential in a source's memory that replaces one of the settings.

It is sealed with a key that is derived from a secret of the settings, so that the database alone opens nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from connectors.source import CREDENTIAL, Memory


class SealedCredential:
    """Law: what was stored is returned as long as the settings that it replaces are the same."""

    def __init__(self, memory: Memory, replaced: str, secret: str, purpose: bytes) -> None:
        """replaced: the credential of the settings, with which everything begins. secret: what the key is derived from,
        for this purpose."""
        self._memory = memory
        self._origin = hashlib.sha256(replaced.encode()).hexdigest()
        key = HKDF(SHA256(), 32, None, purpose).derive(secret.encode())
        self._fernet = Fernet(base64.urlsafe_b64encode(key))

    async def load(self) -> Any | None:
        """Return the stored JSON value; None: none that follows from the credential of the settings."""
        stored = await self._memory.get(CREDENTIAL)
        if stored is None or stored.get("origin") != self._origin:
            return None
        try:
            return json.loads(self._fernet.decrypt(str(stored["sealed"]).encode()))
        except (InvalidToken, ValueError, KeyError):
            return None  # the settings have another secret since

    async def store(self, value: Any) -> None:
        sealed = self._fernet.encrypt(json.dumps(value).encode()).decode()
        await self._memory.put(CREDENTIAL, {"origin": self._origin, "sealed": sealed})
