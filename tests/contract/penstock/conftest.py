"""A query service with a chat model over real stores, for all tests of its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest_asyncio

from deploy.local.stack import Stack
from query.auth.authenticator import local_user
from query.service import Service
from query.settings import ChatSettings
from tests.fakes.chat import FakeChat
from tests.support.query.http_kit import World, service_over
from tests.support.query.leak_paths import Paths
from tests.support.query.library import document

TEXTS = {
    "harbour.md": "# Harbour\n\n## Opening hours\n\nThe harbour opens at nine. It closes when the tide is out.",
    "crane.md": "# Crane\n\nThe crane lifts forty tons. Its driver needs a licence.",
}


@dataclass
class QueryService(World):
    chat: FakeChat

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def service(stack: Stack) -> AsyncIterator[QueryService]:
    """In development mode. The local user may read TEXTS, in the tenant ``default``."""
    async with FakeChat() as chat, Paths.open(stack) as paths:
        settings = ChatSettings(base_url=chat.url, model=chat.model, timeout_seconds=30)
        for name, text in TEXTS.items():
            await paths.library.put(
                document(
                    name,
                    text,
                    tenant="default",
                    title="Rules",
                    author="Ada",
                    source_url=f"https://wiki.example/{name}",
                    acl_tags=[f"user:{local_user()}"],
                )
            )
        async with service_over(paths.library, chat=settings) as (client, running):
            assert isinstance(running, Service)
            yield QueryService(paths.library, paths, client, running, chat)
