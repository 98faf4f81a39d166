"""The order in which a sink serves the generations of a batch, and the generation that a failure belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.model import Generation
from pipeline.observability.metrics import Metrics
from pipeline.stages import sink
from pipeline.stages.sink import Generations
from pipeline.stages.stage import SERVICES_USED, Incoming, services_used, used
from tests.support.space import now
from tests.unit.pipeline.generations.test_generations import LOCAL, SERVED
from topics.codec import encode
from topics.messages import IndexHint


class Lane:
    """One lane of a sink with work of g1 and g2, and generations whose services fail as it is said."""

    def __init__(self, **states: str) -> None:
        self.states = states
        self.failing: dict[str, Exception] = {}
        self.asks: dict[str, str] = {}
        self.served: list[str] = []
        nowhere: Any = None  # nothing is set aside here: that would need the ledger
        self.generations = Generations("vectors", nowhere, self.known, Metrics())

    async def known(self) -> dict[str, Generation]:
        both: Any = ((g.name, replace(g, state=self.states[g.name])) for g in (LOCAL, SERVED))
        return dict(both)

    async def converge(self, generation: Generation, _ids: Sequence[UUID]) -> None:
        self.served.append(generation.name)
        if (error := self.failing.get(generation.name)) is not None:
            raise error
        used(self.asks.get(generation.name, "kafka"))  # type: ignore[arg-type]

    async def serve(self, *names: str) -> list[str]:
        """Return the generations that were reached."""
        self.served.clear()
        batch = []
        for n, name in enumerate(names):
            hint = encode(
                IndexHint(
                    tenant="acme",
                    source="wiki",
                    external_id="a.md",
                    observed_at=now(),
                    document_id=str(uuid4()),
                    generation=name,
                )
            )
            batch.append(Incoming("t", 0, n, hint.key, hint.value, hint.headers, "live"))
        await self.generations.serve(batch, self.converge)
        return list(self.served)


async def test_after_a_cut_over_a_failing_previous_generation_does_not_block_the_active_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink, "REREAD_SECONDS", 0.0)
    lane = Lane(g1="active", g2="building")
    assert await lane.serve("g2", "g1") == ["g1", "g2"]
    lane.states |= {"g1": "previous", "g2": "active"}
    lane.failing["g1"] = Retryable("its table is locked", service="postgres")
    with pytest.raises(Retryable, match="locked"):
        await lane.serve("g1", "g2")
    assert lane.served == ["g2", "g1"]


async def test_a_revoked_key_of_the_active_model_is_misconfigured_though_another_model_answers() -> None:
    lane = Lane(g1="active", g2="building")
    lane.asks["g2"] = "embedding"
    lane.failing["g1"] = Misconfigured("the key was revoked", service="embedding")
    with pytest.raises(Misconfigured, match="revoked"):
        await lane.serve("g1", "g2")
    assert lane.served == ["g1", "g2"], "the other one is served all the same"
    with pytest.raises(Misconfigured, match="revoked"):
        await lane.serve("g1")


async def test_services_used_are_recorded_per_generation_and_for_the_whole_batch() -> None:
    token = SERVICES_USED.set({"postgres"})
    try:
        with services_used() as first:
            used("embedding")
        with services_used() as second:
            used("elasticsearch")
        assert (first, second) == ({"postgres", "embedding"}, {"postgres", "elasticsearch"})
        assert SERVICES_USED.get() == {"postgres", "embedding", "elasticsearch"}
    finally:
        SERVICES_USED.reset(token)
