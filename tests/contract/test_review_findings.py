"""What a review found at the seams between the parts, each with the proof that it is mended."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pipeline.audit.background import BackgroundAudit
from pipeline.core.identity import document_id
from pipeline.rebuild import connect
from pipeline.settings import AuditSettings
from pipeline.stages.stage import Incoming
from pipeline.telemetry import Metrics
from tests.contract.build_kit import Site, document, sections
from tests.space import Space, now
from topics.codec import encode
from topics.messages import IndexHint


@pytest.fixture
async def site(space: Space) -> AsyncIterator[Site]:
    async with Site.create(space) as site:
        yield site


def hint(name: str, generation: str) -> Incoming:
    record = encode(
        IndexHint(
            tenant="acme", source="wiki", external_id=name, observed_at=now(),
            document_id=str(document_id("acme", "wiki", name)), generation=generation,
        )
    )  # fmt: skip
    return Incoming("index.live.v1", 0, 0, record.key, record.value, record.headers, "live")


async def test_the_background_audit_and_a_rebuild_do_not_shut_each_other_out(site: Site) -> None:
    await site.put(document("a", sections("one")))
    producer: object = site.hints
    audit = BackgroundAudit(
        site.pool, site.es, producer, Metrics(), AuditSettings(), second_look_seconds=0.0  # type: ignore[arg-type]
    )  # fmt: skip
    async with connect(site.space.settings.postgres):  # the lock that a rebuild holds for as long as it runs
        await audit.turn()
        assert await site.space.query("SELECT documents FROM audit_runs") == [(1,)]


async def test_a_late_hint_of_a_generation_whose_table_is_gone_is_passed_over(site: Site) -> None:
    """A worker that serves generations for long knows the retired one still; its hints stood in the queue."""
    await site.put(document("a", sections("one")))
    await site.run("vectors")
    assert await site.tables() == {"chunks_g2"}
    await site.vectors.handle([hint("a", "g1"), hint("a", "g2")])
