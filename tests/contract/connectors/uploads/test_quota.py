"""How much uploads may hold, of a tenant and of all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import connectors.uploads.intake
from connectors.declared import load
from connectors.operate import summarize
from connectors.uploads.intake import MAX_INCOMING_FILES
from connectors.uploads.options import UploadsQuota
from connectors.uploads.source import quota_share
from connectors.uploads.store import Usage
from pipeline.core.errors import Misconfigured, Retryable
from tests.support.connectors.uploads_kit import Office, an_office
from tests.support.space import Space
from tests.support.waiting import until

pytestmark = pytest.mark.stack


@pytest.fixture
async def office(space: Space, tmp_path: Path) -> AsyncIterator[Office]:
    async with an_office(space, tmp_path / "connectors") as office:
        yield office


def originals(office: Office, name: str = "files") -> int:
    return sum(path.is_file() for path in (office.home / name / "originals").rglob("*"))


async def post_upload(office: Office, data: bytes, *, key: str = "acme", **fields: str) -> httpx.Response:
    return await office.client.post(
        "/v1/uploads",
        files={"file": ("a.txt", data)},
        data={"acl_tags": "staff", **fields},
        headers={"authorization": f"Bearer key-{key}"},
    )


def is_full(answer: httpx.Response) -> bool:
    assert answer.status_code in (202, 507), answer.text
    if answer.status_code == 507:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["title"] == "Quota reached"
        assert "delete some first" in answer.json()["detail"]
    return answer.status_code == 507


async def test_a_tenant_at_its_quota_is_refused_uploads_until_it_deletes_some(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_UPLOADS_TENANT_BYTES", "100")
    office.declare()
    office.declare("theirs", "rival")
    await office.start()
    first = await office.upload(b"a" * 60)
    second = await office.upload(b"b" * 40, external_id="second")
    answer = await post_upload(office, b"c")
    assert is_full(answer)
    assert "the tenant's uploads have at most 100 bytes" in answer.json()["detail"]
    assert originals(office) == 2, "of a file that was refused nothing stays"
    assert not is_full(await post_upload(office, b"d" * 100, key="rival")), "it is not the other tenant's quota"

    await office.stop()
    office.instances.clear()
    office.declare()
    await office.start()
    await until(lambda: office.instances["files"].source)
    assert is_full(await post_upload(office, b"c"))
    assert not is_full(await post_upload(office, b"e" * 40, external_id="second")), "what does not grow is taken"
    assert is_full(await post_upload(office, b"e" * 41, external_id="second"))
    assert (await office.client.put(f"/v1/uploads/{second}", data={"title": "New"})).status_code == 202
    await office.client.delete(f"/v1/uploads/{first}")
    assert not is_full(await post_upload(office, b"f" * 60))
    assert is_full(await post_upload(office, b"g"))


async def test_concurrent_uploads_to_two_instances_never_exceed_the_quota(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_UPLOADS_TENANT_FILES", "7")
    for name in ("files", "more"):
        office.declare(name)
    await office.start()
    answers = await asyncio.gather(
        *(
            office.client.post(
                "/v1/uploads", params={"source": name, "acl_tags": "staff", "file_name": "a.txt"}, content=b"%d" % n
            )
            for n in range(8)
            for name in ("files", "more")
        )
    )
    assert sum(not is_full(answer) for answer in answers) == 7
    assert originals(office) + originals(office, "more") == 7


async def test_uploads_of_all_tenants_together_have_a_quota(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_UPLOADS_ALL_FILES", "2")
    office.declare()
    office.declare("theirs", "rival")
    await office.start()
    id_ = await office.upload(b"ours")
    assert not is_full(await post_upload(office, b"theirs", key="rival"))
    answer = await post_upload(office, b"more", key="rival")
    assert is_full(answer)
    assert "all tenants' uploads have at most 2 files" in answer.json()["detail"]
    await office.client.delete(f"/v1/uploads/{id_}")
    assert not is_full(await post_upload(office, b"more", key="rival"))


async def test_uploads_refused_because_postgres_cannot_write_leave_no_files(office: Office) -> None:
    office.declare()
    await office.start()
    await office.upload(b"kept")
    async with office.pool.connection() as connection:
        await connection.execute(
            "CREATE FUNCTION refuse_uploads() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'this is a read-only transaction' USING ERRCODE = '25006'; END $$"
        )
        await connection.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON uploads FOR EACH ROW EXECUTE FUNCTION refuse_uploads()"
        )
    assert [(await post_upload(office, b"text %d" % n)).status_code for n in range(3)] == [503] * 3
    await office.intake().measure()
    assert originals(office) == 1, "Postgres does not write yet"
    async with office.pool.connection() as connection:
        await connection.execute("DROP TRIGGER refuse ON uploads")
    assert not is_full(await post_upload(office, b"text 0"))
    assert originals(office) == 2


async def test_the_file_of_an_erased_upload_is_removed_while_its_worker_runs(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock forget` erases rows: files stayed until the worker was restarted."""
    office.declare()
    await office.start()
    await office.upload(b"erased", external_id="erased")
    await office.upload(b"kept")
    await office.space.execute("DELETE FROM uploads WHERE external_id = 'erased'")
    await office.intake().measure()
    assert originals(office) == 2, "they are not searched for each time"
    monkeypatch.setattr(connectors.uploads.intake, "UNUSED_SECONDS", 0)
    await office.intake().measure()
    assert originals(office) == 1


async def test_an_upload_whose_commit_was_not_acknowledged_retains_its_original_file(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office.declare()
    await office.start()
    intake, put = office.intake(), office.intake().table.put

    async def unheard(*given: Any) -> None:
        await put(*given)
        raise Retryable("the connection broke")

    with monkeypatch.context() as broken:
        broken.setattr(intake.table, "put", unheard)
        assert (await post_upload(office, b"text")).status_code == 503
    await intake.measure()
    assert originals(office) == 1
    [upload] = (await office.client.get("/v1/uploads")).json()["uploads"]
    changed = await office.client.put(f"/v1/uploads/{upload['id']}", data={"title": "New"})
    assert changed.status_code == 202, "its original can be read"


async def test_metrics_and_status_show_how_much_of_the_quota_is_used(
    office: Office, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_UPLOADS_TENANT_FILES", "4")
    office.declare()
    await office.start()
    await office.upload(b"text")
    await office.intake().measure()
    assert quota_share(office.instances["files"], "tenant") == 0.25
    (tmp_path / "connectors.toml").write_text('[connector.files]\nkind = "uploads"\ntenant = "acme"\n')
    plan = load(tmp_path / "connectors.toml").plan("files")
    shown = (await summarize(office.pool, plan, with_documents=True)).json()["uploads"]
    assert shown["used"] == {"tenant_files": 1, "tenant_bytes": 4, "all_files": 1, "all_bytes": 4}
    assert shown["quota"]["tenant_files"] == 4


async def test_a_drop_folder_waits_while_its_tenant_is_at_its_quota(
    office: Office, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_UPLOADS_TENANT_FILES", "1")
    monkeypatch.setattr("connectors.uploads.drop.QUOTA_RETRY_SECONDS", 0.1)
    (tmp_path / "in").mkdir()
    office.declare(folder=(tmp_path / "in").resolve(), acl_tags=["staff"], settle_seconds=0.1, scan_seconds=0.1)
    await office.start()
    id_ = await office.upload(b"the first")
    (tmp_path / "in" / "late.txt").write_bytes(b"late")

    async def listed() -> list[str]:
        answer = await office.client.get("/v1/uploads")
        return [upload["file_name"] for upload in answer.json()["uploads"]]

    await asyncio.sleep(1)
    assert await listed() == ["a.txt"]
    await office.client.delete(f"/v1/uploads/{id_}")
    async with asyncio.timeout(60):
        while await listed() != ["late.txt"]:
            await asyncio.sleep(0.05)


async def test_uploads_beyond_the_limit_of_concurrent_files_are_answered_503(office: Office) -> None:
    office.declare()
    await office.start()
    intake = office.intake()
    writing = [intake.writing() for _ in range(MAX_INCOMING_FILES)]
    for file in writing:
        file.__enter__()
    answer = await post_upload(office, b"one more")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    for file in writing:
        file.__exit__(None, None, None)
    assert not is_full(await post_upload(office, b"one more"))


def test_a_quota_of_zero_means_no_limit() -> None:
    quota = UploadsQuota(tenant_bytes=0, tenant_files=10, all_bytes=0, all_files=0)
    used = Usage(tenant_files=5, tenant_bytes=10**15, all_files=10**9, all_bytes=10**15)
    used.require_within(quota)
    assert (used.share(quota, "tenant"), used.share(quota, "all")) == (0.5, 0.0)


def test_an_invalid_quota_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_UPLOADS_TENANT_BYTES", "much")
    with pytest.raises(Misconfigured, match="PENSTOCK_UPLOADS_TENANT_BYTES"):
        UploadsQuota.load()


async def test_deleting_an_upload_clears_its_title_tags_and_metadata(
    office: Office,
) -> None:
    """Half a megabyte of words a file, kept for 30 days after its deletion, would fill the database for everybody."""
    office.declare()
    await office.start()
    said = {"title": "t" * 4_000, "required_tags": "s" * 500, "metadata": json.dumps({"of": "m" * 60_000})}
    answer = await post_upload(office, b"a", **said)
    id_ = answer.json()["id"]
    assert len((await office.status(id_))["metadata"]["of"]) == 60_000
    assert (await office.client.delete(f"/v1/uploads/{id_}")).status_code == 202
    left = await office.status(id_)
    assert (left["state"], left["file_name"], left["size"]) == ("deleted", "a.txt", 1)
    assert (left["title"], left["acl_tags"], left["required_tags"], left["metadata"]) == (None, [], [], {})
