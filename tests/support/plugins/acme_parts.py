"""A source, a reranker and an extractor of a format in which everything is shouted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import IO, Any

from penstock.extract import Extracted, Limits, UnreadableFile
from penstock.source import Cursor, Listed, Page, SmallSource, StrictOptions

NUMBER = 4711


class Options(StrictOptions):
    url: str


class Tickets(SmallSource):
    Options = Options

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        yield Page([], {})

    async def slim(self) -> AsyncIterator[Sequence[Listed]]:
        yield []


class ByLength:
    """The longer passage is the better one."""

    model = "by-length"

    def __init__(self, settings: Any) -> None:
        self.pool = settings.pool

    async def rerank(self, query: str, texts: Sequence[str], *, tenant: str = "") -> Sequence[float]:
        return [float(len(text)) for text in texts]

    async def aclose(self) -> None:
        return None


def read_shout(file: IO[bytes], limits: Limits) -> Extracted:
    text = file.read().decode()
    if text != text.upper():
        raise UnreadableFile("broken", "is not shouted")
    return Extracted(text.lower(), "text/plain", title="Shouted", metadata={"pages": 1})
