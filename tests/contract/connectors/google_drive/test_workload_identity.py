"""A service account without a key: its tokens come from what a file of another identity provider proves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.auth import iam, impersonated_credentials

from connectors.fakes.google_drive_services import IDENTITY
from connectors.google_drive.client import DRIVE_SCOPE, MEMBER_SCOPE
from connectors.google_drive.playground import ACCOUNT
from tests.support.connectors.google_drive_kit import Desk, desk_in
from tests.support.connectors.reading import everything, groups


@pytest.fixture
async def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    """Google's addresses, which the library knows by itself, lead to the fake."""
    async with desk_in(tmp_path) as desk:
        base = f"{desk.url}/v1/projects/-/serviceAccounts/{{}}"
        monkeypatch.setattr(iam, "_IAM_ENDPOINT", f"{base}:generateAccessToken")
        monkeypatch.setattr(iam, "_IAM_SIGNJWT_ENDPOINT", f"{base}:signJwt")
        monkeypatch.setattr(impersonated_credentials, "_GOOGLE_OAUTH2_TOKEN_ENDPOINT", f"{desk.url}/token")
        (proof := tmp_path / "proof").write_text(IDENTITY)
        desk.key = desk.fake.tokens.workload_identity(ACCOUNT, desk.url, str(proof))
        desk.fake.tokens.impersonated.add(ACCOUNT)
        yield desk


async def test_documents_and_members_are_read_without_a_key(desk: Desk) -> None:
    drive = desk.drive()
    id_ = desk.doc("Document", drive)
    source = desk.source(drives=[drive])
    assert await source.check() == []
    assert (await everything(source)).keys() == {id_}
    assert f"drive:{drive}" in await groups(source)
    accounts = {(token.account, token.scopes) for token in desk.fake.tokens.issued.values()}
    assert (ACCOUNT, frozenset({DRIVE_SCOPE})) in accounts


async def test_users_are_read_on_their_behalf_without_a_key(desk: Desk) -> None:
    desk.fake.tokens.delegated[ACCOUNT] |= {DRIVE_SCOPE, MEMBER_SCOPE}
    id_ = desk.doc("Document", None, owner="ines@example.com")
    source = desk.source(my_drive=True, subject="ines@example.com")
    assert (await everything(source)).keys() == {id_}


async def test_check_says_which_role_the_workload_lacks(desk: Desk) -> None:
    desk.fake.tokens.impersonated.clear()
    [problem] = await desk.source(drives=[desk.drive()]).check()
    assert problem.code == "credential"
    assert "grant it Service Account Token Creator" in problem.message


async def test_check_says_that_the_proof_is_refused(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "proof").write_text("CANARY")
    [problem] = await desk.source(drives=[desk.drive()]).check()
    assert problem.message == f"service account {ACCOUNT} gets no access token (invalid_grant)"


async def test_check_says_that_the_machine_has_no_credentials(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nowhere")
    source = desk.source(drives=[desk.drive()], service_account_key=None, service_account=ACCOUNT)
    [problem] = await source.check()
    assert "this machine has no credentials of Google" in problem.message
