"""Defaults for small sources. Inheriting from them is optional: the contract is ``connectors.source.Source``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from connectors.protocol import Problem
from connectors.source import Context, Cursor, Document, Entry, Gone, Group, Reaction, Refused, Request
from connectors.web import Denied, Missing, Web
from pipeline.core.errors import Misconfigured


class StrictOptions(BaseModel):
    """Settings of a source; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SmallSource:
    """A source that reads documents one by one (``read``), and has no groups, events or socket unless a subclass adds
    them."""

    Options: ClassVar[type[BaseModel]] = StrictOptions
    web: Web | None = None
    """Closed with the source."""

    def __init__(self, options: Any, context: Context) -> None:
        self.options, self.context = options, context

    async def close(self) -> None:
        if self.web is not None:
            await self.web.close()

    async def check(self) -> Sequence[Problem]:
        """Check whether ``start`` succeeds."""
        try:
            await self.start()
        except (Denied, Missing, Misconfigured) as error:
            return [Problem(self.context.name, "denied" if isinstance(error, Denied) else "refused", str(error))]
        return []

    async def start(self) -> Cursor:
        raise NotImplementedError

    async def read(self, external_id: str) -> Document:
        """Read one document as it is now. Raises Missing when the source says that it does not exist."""
        raise NotImplementedError

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        return [await self._read_entry(external_id) for external_id in external_ids]

    async def _read_entry(self, external_id: str) -> Entry:
        try:
            return await self.read(external_id)
        except Missing:
            return Gone(external_id)

    async def groups(self, tags: Collection[str] | None = None) -> AsyncIterator[Group]:
        nothing: tuple[Group, ...] = ()
        for group in nothing:
            yield group

    async def on_event(self, request: Request) -> Reaction:
        raise Refused("this connector accepts no events")

    async def listen(self, react: Callable[[Reaction], Awaitable[None]]) -> None:
        return None
