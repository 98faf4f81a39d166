"""``penstock audit`` as people and programs call it, on real workers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from elasticsearch import AsyncElasticsearch

from pipeline.core.identity import document_id
from pipeline.stores.elasticsearch import connect
from tests.support.processes import run_penstock
from tests.support.space import Space
from topics.messages import DocumentUpserted

pytestmark = pytest.mark.stack


def penstock(space: Space, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    done = run_penstock(*arguments, env=space.environment)
    return done.returncode, done.stdout, done.stderr


def run_audit(space: Space, *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, err = penstock(space, "audit", "--json", *arguments)
    assert "error:" not in err, err
    return code, json.loads(out)


def page(n: int) -> DocumentUpserted:
    from tests.support.space import now

    return DocumentUpserted(
        tenant="acme",
        source="wiki",
        external_id=f"page-{n}.md",
        observed_at=now(),
        version=1,
        title=f"Page {n}",
        content=f"# Page {n}\n\nWhat there is to know about subject {n}.",
        acl_tags=["staff"],
        media_type="text/markdown",
    )


@pytest.mark.slow
async def test_penstock_audit_reports_and_repairs_lost_rows_and_entries(space: Space) -> None:
    pages = [page(n) for n in range(20)]
    ids = {m.external_id: str(document_id("acme", "wiki", m.external_id)) for m in pages}
    space.start("detect", "vectors", "keywords")
    await space.publish(*pages)
    await space.settled(pages)
    code, clean = run_audit(space)
    assert (code, clean["clean"], clean["documents"], clean["differences"]) == (0, True, 20, [])

    es: AsyncElasticsearch = connect(space.settings.elasticsearch)
    index = f"{space.settings.elasticsearch.index_prefix}chunks-g1"
    lost = {("page-3.md", "vectors"), ("page-7.md", "vectors"), ("page-5.md", "keywords"), ("page-7.md", "keywords")}
    try:
        for name, store in lost:
            [(chunk,)] = await space.query("SELECT id FROM chunks_g1 WHERE document_id = %s", ids[name])
            if store == "keywords":
                await es.delete(index=index, id=str(chunk), refresh=True)
        await space.query(
            "WITH gone AS (DELETE FROM chunks_g1 WHERE document_id = ANY(%s::uuid[]) RETURNING id) SELECT id FROM gone",
            [ids[name] for name, store in lost if store == "vectors"],
        )
    finally:
        await es.close()

    code, report = run_audit(space, "--since", "2h")
    assert code == 1
    assert report["clean"] is False
    expected = {(ids[name], store, "missing") for name, store in lost}
    assert {(d["document_id"], d["store"], d["kind"]) for d in report["differences"]} == expected
    assert {d["external_id"] for d in report["differences"]} == {"page-3.md", "page-5.md", "page-7.md"}

    code, out, err = penstock(space, "audit", "--sample", "0")
    assert code == 1
    assert "differ" in out
    assert "penstock audit --repair" in err
    assert all(ids[name] in out for name, _ in lost)

    code, repaired = run_audit(space, "--repair")
    assert (code, repaired["clean"], repaired["left"], repaired["repaired"]) == (0, True, 0, 4)
    assert all(d["repaired"] for d in repaired["differences"])
    assert run_audit(space)[0] == 0
    code, again = run_audit(space, "--since", "last")
    assert (code, again["documents"]) == (0, 20)


async def test_penstock_audit_distinguishes_usage_errors_from_differences(space: Space) -> None:
    for arguments, word in (
        (("--since", "yesterday"), "2026-11-20T08:00"),
        (("--generation", "g9"), "g1"),
        (("--resume", "--since", "2h"), "--resume"),
        (("--sample", "-1"), "--sample"),
    ):
        code, _, err = penstock(space, "audit", *arguments)
        assert code == 2, err
        assert word in err
    code, _, err = penstock(space, "audit", "--resume")
    assert (code, err.strip().splitlines()[-1][:6]) == (1, "error:")
    code, _, err = penstock(space, "audit", "--since", "last")
    assert code == 1
    assert "no audit has finished yet" in err
    assert run_audit(space)[1]["documents"] == 0
