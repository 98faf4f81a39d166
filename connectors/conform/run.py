"""Tests the laws one after another, each on a playground and in a tenant of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from connectors.conform import conversations, misbehaviour
from connectors.conform.laws import LAWS, LAWS_OF_FAILURE, Law
from connectors.conform.trial import LOADING, Broken, Record, RecordingProducer, Trial, trial
from connectors.declared import source_class
from connectors.fakes.misbehaviour import Entry
from connectors.faults import foreign
from connectors.runner.activity import explained
from connectors.source import Source
from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.kafka.client import producer
from pipeline.kafka.producer import Producer
from pipeline.runtime.settings import Settings
from pipeline.stores.postgres import Pool, open_pool

ALL_LAWS: dict[str, Law] = {**LAWS, **LAWS_OF_FAILURE}
CONVERSATIONS = "conversations"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a law holds, and why."""

    law: str
    holds: bool
    why: str
    seconds: float
    fault: BaseException | None = None
    """An error of the source's or the playground's own code."""
    stops: bool = False
    """Whether nothing could be loaded until a person mends something, so that no other law can hold."""

    def line(self) -> str:
        return f"{'✓' if self.holds else '✗'} {self.law:18} {self.why}"

    def json(self) -> dict[str, Any]:
        return {"law": self.law, "holds": self.holds, "why": self.why, "seconds": round(self.seconds, 1)}


async def conform_on(
    settings: Settings,
    kind: str,
    laws: Collection[str] | None = None,
    *,
    on_verdict: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Test laws (by default all) on the running stack, whose detect worker has to run. Raises Misconfigured for an
    unknown kind or law.

    A kind with entries in the catalogue of vendors' misbehaviour has a law for each (connectors.conform.misbehaviour).
    If nothing can be loaded in the first law, it is the last.
    The kind ``conversations`` is no source: it has laws of its own (connectors.conform.conversations).
    """
    is_served = kind == CONVERSATIONS
    entries: Mapping[str, Entry] = {} if is_served else misbehaviour.entries_of(source_class(kind))
    every: Collection[str] = conversations.LAWS if is_served else [*ALL_LAWS, *entries]
    if unknown := sorted(set(laws or ()) - set(every)):
        raise Misconfigured(f"no law is called {unknown[0]!r}: choose one of {', '.join(every)}")
    verdicts = []
    async with open_pool(settings.postgres) as pool, producer(settings.kafka) as kafka:
        for name in laws or every:
            if is_served:
                verdict = await _try_conversation_law(name, pool, kafka)
            elif name in entries:
                verdict = await try_entry(entries[name])
            else:
                verdict = await try_law(name, _with_playground(kind), settings, pool, kafka)
            verdicts.append(verdict)
            if on_verdict is not None:
                on_verdict(verdict)
            if verdicts[0].stops:
                break
    return verdicts


def _with_playground(kind: str) -> type[Source]:
    cls = source_class(kind)
    if getattr(cls, "playground", None) is None:
        raise Misconfigured(
            f"{kind}: the class has no playground, so no law can be tested; see docs/connectors/your-own.md"
        )
    return cls


async def _try_conversation_law(name: str, pool: Pool, kafka: Producer) -> Verdict:
    began = monotonic()
    try:
        async with conversations.serve_api(pool, kafka) as api:
            why, holds = await conversations.LAWS[name](api), True
    except (Broken, PenstockError) as broken:
        why, holds = str(broken), False
    return Verdict(name, holds, why, monotonic() - began)


async def try_entry(entry: Entry) -> Verdict:
    """Test that the source of an entry withstands it. It needs no stack."""
    began = monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-conform-") as folder:
        try:
            why, holds, fault = await misbehaviour.show(entry, Path(folder)), True, None
        except Broken as broken:
            why, holds, fault = str(broken), False, None
        except Exception as error:  # noqa: BLE001 # a source is foreign code
            why, holds, fault = explained(error), False, foreign(error)
    return Verdict(entry.id, holds, why, monotonic() - began, fault)


async def try_law(
    name: str,
    kind: type[Source],
    settings: Settings,
    pool: Pool,
    kafka: Producer,
    *,
    in_stores: Callable[[Trial], Awaitable[None]] | None = None,
) -> Verdict:
    """Test one law. in_stores: called after the law, to check both stores; the trial then waits for the stores, too."""
    began, record = monotonic(), Record()
    is_loaded = is_hopeless = False
    with tempfile.TemporaryDirectory(prefix="penstock-conform-") as folder:
        witness, with_stores = RecordingProducer(kafka), in_stores is not None
        try:
            async with trial(kind, settings.postgres, pool, witness, Path(folder), record, with_stores) as made:
                try:
                    why, holds = await ALL_LAWS[name](made), True
                    if in_stores is not None:
                        await in_stores(made)
                finally:
                    is_loaded, is_hopeless = made.is_loaded, made.needs_attention(*LOADING)
        except Broken as broken:
            why, holds = str(broken), False
        except Exception as error:  # noqa: BLE001 # a source and its playground are foreign code
            why, holds, is_hopeless = explained(error), False, not isinstance(error, Retryable)
            record.fault = record.fault or foreign(error)
    fault = None if holds else record.fault
    return Verdict(name, holds, why, monotonic() - began, fault, not (holds or is_loaded) and is_hopeless)
