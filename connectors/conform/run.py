"""The laws, one by one, each on a playground and in a tenant of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from connectors.conform import conversations
from connectors.conform.laws import LAWS, LAWS_OF_FAILURE, Law
from connectors.conform.trial import Broken, Trial, Witness, trial
from connectors.declared import source_class
from connectors.runner.activity import explained
from connectors.source import Source
from pipeline.core.errors import Misconfigured, PenstockError
from pipeline.kafka.client import producer
from pipeline.kafka.producer import Producer
from pipeline.runtime.settings import Settings
from pipeline.stores.postgres import Pool, open_pool

EVERY: dict[str, Law] = {**LAWS, **LAWS_OF_FAILURE}
CONVERSATIONS = "conversations"


@dataclass(frozen=True, slots=True)
class Verdict:
    law: str
    holds: bool
    why: str
    seconds: float

    def line(self) -> str:
        return f"{'✓' if self.holds else '✗'} {self.law:18} {self.why}"

    def json(self) -> dict[str, Any]:
        return {"law": self.law, "holds": self.holds, "why": self.why, "seconds": round(self.seconds, 1)}


async def conform_on(
    settings: Settings, kind: str, laws: Collection[str] | None = None, *, tell: Callable[[Verdict], None] | None = None
) -> list[Verdict]:
    """On the running stack (its detect worker has to run). Raises Misconfigured for an unknown kind or law.

    The conversations are no source: what their way in promises is tried instead.
    """
    served = kind == CONVERSATIONS
    every: Collection[str] = conversations.LAWS if served else EVERY
    if unknown := sorted(set(laws or ()) - set(every)):
        raise Misconfigured(f"no law is called {unknown[0]!r}: choose of {', '.join(every)}")
    verdicts = []
    async with open_pool(settings.postgres) as pool, producer(settings.kafka) as kafka:
        for name in laws or every:
            verdict = await (
                _served(name, pool, kafka) if served else tried(name, _playable(kind), settings, pool, kafka)
            )
            verdicts.append(verdict)
            if tell is not None:
                tell(verdict)
    return verdicts


def _playable(kind: str) -> type[Source]:
    cls = source_class(kind)
    if getattr(cls, "playground", None) is None:
        raise Misconfigured(
            f"{kind}: the class has no playground, so nothing can be proved; see docs/connectors/your-own.md"
        )
    return cls


async def _served(name: str, pool: Pool, kafka: Producer) -> Verdict:
    began = monotonic()
    try:
        async with conversations.desk(pool, kafka) as desk:
            why, holds = await conversations.LAWS[name](desk), True
    except (Broken, PenstockError) as broken:
        why, holds = str(broken), False
    return Verdict(name, holds, why, monotonic() - began)


async def tried(
    name: str,
    kind: type[Source],
    settings: Settings,
    pool: Pool,
    kafka: Producer,
    *,
    in_stores: Callable[[Trial], Awaitable[None]] | None = None,
) -> Verdict:
    """in_stores: whether both stores hold what the law ended with; then all is waited for until they do."""
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-conform-") as folder:
        try:
            async with trial(
                kind, settings.postgres, pool, Witness(kafka), Path(folder), with_stores=in_stores is not None
            ) as made:
                why, holds = await EVERY[name](made), True
                if in_stores is not None:
                    await in_stores(made)
        except Broken as broken:
            why, holds = str(broken), False
        except Exception as error:  # noqa: BLE001 # a source and its playground are somebody else's code
            why, holds = explained(error), False
    return Verdict(name, holds, why, monotonic() - began)
