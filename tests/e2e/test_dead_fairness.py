"""One tenant's records are all bad, thousands of them: what another tenant's people are shown is as fresh as ever."""

from __future__ import annotations

import json

import pytest

from pipeline.kafka.client import deliver, producer
from tests.e2e.test_cli import run
from tests.e2e.test_dead import TYPE, metric
from tests.e2e.test_stream import document
from tests.support.space import Space, now
from topics.messages import AccessChanged, DocumentUpserted
from topics.registry import DOCUMENTS_LIVE

pytestmark = [pytest.mark.stack, pytest.mark.slow]

BAD, VALID, DOCUMENTS = 3_000, 600, 20
REVOKED = (
    "SELECT count(*) FROM documents d JOIN access_sets a ON a.id = d.access_id"
    " WHERE d.tenant = 'acme' AND a.acl_tags = ARRAY['wiki/boss']"
)
OF_OTHERS = "SELECT count(*) FROM dead_letters WHERE tenant = 'other'"


async def flood(space: Space, records: int = BAD) -> None:
    """Bad records of the tenant "other", in every partition, far more than the limit on dead letters."""
    async with producer(space.settings.kafka) as kafka:
        await deliver(kafka.send_raw(DOCUMENTS_LIVE, b"other/drive/%d" % n, b"{", TYPE) for n in range(records))


async def revoke(space: Space, documents: list[DocumentUpserted]) -> None:
    await space.publish(
        *(
            AccessChanged(
                tenant=d.tenant, source=d.source, external_id=d.external_id, observed_at=now(), acl_tags=["boss"]
            )
            for d in documents
        )
    )


async def shared_by_acme(space: Space) -> list[DocumentUpserted]:
    """Documents of the tenant "acme", taken in."""
    documents = [document(f"{n}.md", f"# {n}\n\nSalaries of {n}.") for n in range(DOCUMENTS)]
    await space.publish(*documents)
    await space.until("SELECT count(*) FROM documents WHERE tenant = 'acme'", DOCUMENTS)
    return documents


async def test_poison_of_one_tenant_does_not_delay_another_tenants_revocation(space: Space) -> None:
    space.start("detect")
    documents = await shared_by_acme(space)
    await flood(space)
    await revoke(space, documents)
    await space.until(REVOKED, DOCUMENTS)
    await space.until(OF_OTHERS, BAD)  # acme's records get through: the fault is that one source's alone
    assert metric(space, "penstock_dead_letter_floods_total") == 0
    assert metric(space, "penstock_dead_letter_pause_seconds") == 0

    listed = run(space, "dead", "list").stdout.splitlines()
    assert len(listed) == 1 + 50 + 1
    assert f"{BAD} dead letters (invalid {BAD}), 50 shown" in listed[-1]
    output = json.loads(run(space, "status", "--json").stdout)["dead_letters"]
    assert (output["waiting"], [code_count["code"] for code_count in output["by_code"]]) == (BAD, ["invalid"])


async def test_a_worker_that_starts_into_a_flood_of_poison_handles_later_revocations(
    space: Space,
) -> None:
    """A worker that has just started has seen nothing but the flood: it cannot know yet whose fault that is."""
    space.start("detect")
    documents = await shared_by_acme(space)
    assert space.stop("detect") == 0
    await flood(space)
    space.start("detect", env={"PENSTOCK_STREAM_DEAD_LETTERS_PER_MINUTE": "20"})
    await space.until(OF_OTHERS, 20)
    assert metric(space, "penstock_dead_letter_floods_total") == 1
    await revoke(space, documents)
    await space.until(REVOKED, DOCUMENTS)
    await space.until(OF_OTHERS, BAD)  # … and now it does
    assert metric(space, "penstock_dead_letter_pause_seconds") == 0


async def test_many_documents_of_one_tenant_do_not_delay_another_tenants_revocation(space: Space) -> None:
    """Live documents of a source beyond its budget wait with the backfill, and arrive all the same."""
    space.start("detect", env={"PENSTOCK_STREAM_LIVE_DOCUMENTS_PER_SECOND": "5"})
    documents = await shared_by_acme(space)
    await space.publish(*(document(f"{n}.md", f"Text {n}.", tenant="other", source="drive") for n in range(VALID)))
    await revoke(space, documents)
    await space.until(REVOKED, DOCUMENTS)
    await space.until("SELECT count(*) FROM documents WHERE tenant = 'other'", VALID)
    [(later,)] = await space.query(
        "SELECT count(*) FROM documents WHERE tenant = 'other'"
        " AND seq > (SELECT max(seq) FROM documents WHERE tenant = 'acme')"
    )
    assert later > VALID / 2, "the revocations waited behind the flood"
    assert metric(space, "penstock_live_deferred_total") > VALID / 2
