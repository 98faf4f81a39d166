"""Kafka's own users: a name and a password by SCRAM-SHA-512 (KIP-554).

A password leaves this process salted and hashed, as RFC 5802 has it; ``kafka-configs`` would show it in the process
list. aiokafka has no such request: these are the protocol's own shapes.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from pipeline.core.errors import Misconfigured

SCRAM_SHA_512 = 2
ITERATIONS = 8192
"""Kafka's own minimum is 4096."""
KEY = 51


class _Response(Response):  # type: ignore[misc]  # aiokafka's protocol has no types
    API_KEY = KEY
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "results",
            CompactArray(
                ("user", CompactString("utf-8")),
                ("error_code", Int16),
                ("error_message", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _Struct(RequestStruct):  # type: ignore[misc]  # aiokafka's protocol has no types
    API_KEY = KEY
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Response
    SCHEMA = Schema(
        ("deletions", CompactArray(("name", CompactString("utf-8")), ("mechanism", Int8), ("tags", TaggedFields))),
        (
            "upsertions",
            CompactArray(
                ("name", CompactString("utf-8")),
                ("mechanism", Int8),
                ("iterations", Int32),
                ("salt", CompactBytes),
                ("salted_password", CompactBytes),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class AlterUserScramCredentials(Request[_Struct]):  # type: ignore[misc]  # aiokafka's protocol has no types
    """Gives these users these passwords. Its response's ``results``: one (user, error code, message, …) for each."""

    API_KEY = KEY

    def __init__(self, passwords: dict[str, str]) -> None:
        self._passwords = passwords

    def build(self, request_struct_class: type[_Struct]) -> _Struct:
        upsertions: list[tuple[str, int, int, bytes, bytes, dict[int, bytes]]] = []
        for user, password in self._passwords.items():
            salt = secrets.token_bytes(32)
            salted = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, ITERATIONS)
            upsertions.append((user, SCRAM_SHA_512, ITERATIONS, salt, salted, {}))
        return request_struct_class([], upsertions, {})


def passwords_in(folder: Path, users: set[str]) -> dict[str, str]:
    """user → password, of those that have a file of their name in the folder. Raises Misconfigured."""
    try:
        passwords = {user: (folder / user).read_text("utf-8").strip() for user in users if (folder / user).exists()}
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "one is not UTF-8"  # its own text shows a byte of it
        raise Misconfigured(f"{folder}: the passwords of Kafka's users cannot be read: {why}") from error
    empty = sorted(user for user, password in passwords.items() if not password)
    if empty or not passwords:
        what = f"{', '.join(empty)}: empty" if empty else f"no file is named as one of {', '.join(sorted(users))}"
        raise Misconfigured(f"{folder}: {what}; each holds one user's password", service="kafka")
    return passwords
