"""Each thing breaks, one after another, while people search: exactly the alerts fire that docs/runbooks/README.md says,
and what its runbook says clears them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.stack import Stack
from pipeline.kafka.client import deliver, producer
from tests.support.deploy.prometheus_kit import Watched, page, watched
from topics.registry import DOCUMENTS_LIVE

pytestmark = [pytest.mark.stack, pytest.mark.slow]

ALWAYS = 10**9
TABLE = "<table><tr>" + 100 * '<td colspan="1000">x</td>' + "</tr></table>"
ENDLESS = 30 * TABLE
"""A page of 75 kB that is longer than 16 million characters as Markdown."""


@pytest.mark.timeout(900)
async def test_each_fault_raises_exactly_its_alerts_and_its_repair_clears_them(stack: Stack, tmp_path: Path) -> None:
    async with watched(stack, tmp_path) as world, world.in_use():
        await world.fires()
        for rehearsed in (
            unreadable_record,
            refused_document,
            lost_rows,
            unreadable_source,
            reranker_outage,
            model_outage,
        ):
            await rehearsed(world)
            await world.fires()


async def unreadable_record(world: Watched) -> None:
    async with producer(world.space.settings.kafka) as kafka:
        await deliver([kafka.send_raw(DOCUMENTS_LIVE, b"default/wiki/page", b"no JSON", [])])
    await world.fires("PenstockDeadLetters")
    [(letter,)] = await world.space.query("SELECT id FROM dead_letters")
    code, _ = await world.space.penstock("dead", "dismiss", letter, "--reason", "a rehearsal", "--json")
    assert code == 0


async def refused_document(world: Watched) -> None:
    """A document of the source never gets into the ledger: for its readers, the source is not complete."""
    refused = world.notes / "table.html"
    refused.write_text(ENDLESS)
    await world.fires("PenstockDeadLetters", "PenstockCertificateOld", within_seconds=300)
    # The three commands of docs/runbooks/certificate.md, and what it says that they show.
    _, connectors = await world.space.penstock("connector", "status", "notes", "--json")
    assert "notes" in str(connectors)
    _, letters = await world.space.penstock("dead", "list", "--json")
    assert "too_large" in str(letters)
    _, status = await world.space.penstock("status", "--json")
    assert status
    refused.write_text("<p>The table is a file of its own now.</p>")
    for (letter,) in await world.space.query("SELECT id FROM dead_letters"):
        await world.space.penstock("dead", "dismiss", letter, "--reason", "a rehearsal", "--json")


async def lost_rows(world: Watched) -> None:
    kept = page(100, 1)
    await world.space.publish(kept)
    await world.space.settled([kept])
    lost = await world.space.execute(
        "DELETE FROM chunks_g1 WHERE document_id = (SELECT id FROM documents WHERE external_id = %s)", kept.external_id
    )
    assert lost == 1
    await world.space.execute("UPDATE audit_runs SET started_at = started_at - interval '1 day'")  # the next one begins
    await world.fires("PenstockDivergence")
    code, _ = await world.space.penstock("audit", "--repair", "--json")
    assert code == 0


async def unreadable_source(world: Watched) -> None:
    with world.unreadable():
        await world.fires("PenstockConnectorNotWorking", "PenstockAccessOld")


async def reranker_outage(world: Watched) -> None:
    world.reranker.faults.hang = ALWAYS
    await world.fires("PenstockRerankFallback", "PenstockAnswersDegraded")
    world.reranker.faults.hang = 0


async def model_outage(world: Watched) -> None:
    world.model.faults.hang = ALWAYS
    await world.fires("PenstockBreakerOpen", "PenstockOldestPending", "PenstockCanaryLate", "PenstockAnswersDegraded")
    world.model.faults.hang = 0
