"""A check stores nothing but a credential that replaces one of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from pydantic import SecretStr

from connectors.operate import check_all
from connectors.protocol import Problem
from connectors.runner.plan import Plan
from connectors.runner.state import PostgresMemory
from connectors.source import CREDENTIAL, Context, Source
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores.postgres import open_pool

pytestmark = pytest.mark.stack


class Remembering:
    """A source whose check replaces a credential, and stores something else."""

    def __init__(self, context: Context) -> None:
        self._memory = context.memory

    async def check(self) -> Sequence[Problem]:
        number = (await self._memory.get(CREDENTIAL) or {"number": 0})["number"]
        await self._memory.put(CREDENTIAL, {"number": number + 1})
        await self._memory.put("tags", ["anything"])
        assert await self._memory.get("tags") == ["anything"]
        return [Problem("number", "number", str(number))]

    async def close(self) -> None: ...


async def test_a_check_uses_and_replaces_the_credential_of_the_instance_and_stores_nothing_else(dsn: str) -> None:
    def make(context: Context) -> Source:
        return cast(Any, Remembering(context))

    plan = Plan(name="wiki", tenant="acme", kind="confluence", make=make)
    postgres = PostgresSettings(dsn=SecretStr(dsn))
    async with open_pool(postgres) as pool:
        memory = PostgresMemory(pool, "acme", "wiki")
        await memory.put(CREDENTIAL, {"number": 6})
        [problem] = (await check_all([plan], None, postgres))["wiki"]
        assert problem.message == "6"
        assert await memory.get(CREDENTIAL) == {"number": 7}
        assert await memory.get("tags") is None
