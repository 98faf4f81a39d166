"""``check`` reports what is missing, and no secret."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from pydantic import ValidationError

from connectors.conform.memory_runner import InMemory
from connectors.declared import options as declared_options
from connectors.fakes.google_drive_corpus import FOLDER, Grant
from connectors.google_drive import GoogleDrive, GoogleDriveOptions
from connectors.google_drive.playground import ACCOUNT, ADMIN, playing
from connectors.source import Context
from pipeline.core.errors import Misconfigured, PenstockError
from tests.support.connectors.google_drive_kit import Desk, desk_in
from tests.support.connectors.reading import everything


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        yield desk


async def said(source: GoogleDrive) -> list[tuple[str, str]]:
    return [(problem.code, problem.message) for problem in await source.check()]


async def test_check_reports_no_problem_when_everything_is_permitted(desk: Desk) -> None:
    assert await said(desk.source(drives=[desk.drive()], domains=["example.com"])) == []


async def test_check_reports_that_the_drive_api_is_not_enabled(desk: Desk) -> None:
    desk.fake.faults.disabled = True
    [(code, message)] = await said(desk.source(drives=[desk.drive()]))
    assert code == "credential"
    assert "enable the Google Drive API" in message


async def test_check_reports_missing_domain_wide_delegation(desk: Desk) -> None:
    [(code, message)] = await said(desk.source(my_drive=True, subject="ines@example.com"))
    assert code == "credential"
    assert "Domain-wide delegation" in message
    assert "auth/drive.readonly" in message


async def test_check_reports_an_unknown_account(desk: Desk) -> None:
    del desk.corpus.users[ACCOUNT]
    [(code, message)] = await said(desk.source(my_drive=True))
    assert code == "credential"
    assert "invalid_grant" in message


async def test_check_reports_that_the_directory_scope_is_not_delegated(desk: Desk) -> None:
    desk.fake.tokens.delegated.clear()
    [(code, message)] = await said(desk.source(drives=[desk.drive()]))
    assert code == "directory"
    assert "admin.directory.group.member.readonly" in message


async def test_check_reports_that_the_directory_subject_is_no_administrator(desk: Desk) -> None:
    desk.fake.directory.admins.clear()
    messages = await said(desk.source(drives=[desk.drive()], domains=["example.com"]))
    assert [code for code, _ in messages] == ["directory", "directory"]
    assert all(ADMIN in message for _, message in messages)


async def test_check_names_missing_drives_and_folders(desk: Desk) -> None:
    file = desk.doc("Document", desk.drive())
    shown = desk.corpus.add("Seen", owner="ines@example.com", mime_type=FOLDER).id
    desk.corpus.share(shown, Grant(type="user", who=ACCOUNT, role="reader"))
    source = desk.source(drives=["0ANotThere"], folders=["1FNotThere", file, shown])
    assert [code for code, _ in await said(source)] == ["drive", "folder", "folder", "permissions"]
    text = " ".join(message for _, message in await said(source))
    for word in ("0ANotThere", "1FNotThere", f"{file} is not a folder", f"{shown} is in a My Drive"):
        assert word in text


async def test_check_reports_that_no_shared_drive_is_visible(desk: Desk) -> None:
    [(code, _)] = await said(desk.source(all_drives=True))
    assert code == "drive"


async def test_a_token_without_the_scope_raises_misconfigured_naming_it(desk: Desk) -> None:
    source = desk.source(my_drive=True)
    await everything(source)
    for name, token in desk.fake.tokens.issued.items():
        desk.fake.tokens.issued[name] = type(token)(token.account, frozenset({"other"}), token.expires_at)
    with pytest.raises(Misconfigured, match=r"lacks a scope: .*drive\.readonly"):
        await everything(source)


# Settings


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"drives": ["https://drive.google.com/drive/folders/1"]},
        {"my_drive": True, "anyone_tag": "everyone"},
        {"my_drive": True, "subject": "not an address"},
        {"my_drive": True, "colour": "red"},
        {"my_drive": True, "api_url": "http://www.googleapis.com"},
    ],
)
def test_invalid_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GoogleDriveOptions(service_account_key="{}", **wrong)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("{broken", "not valid JSON"),
        ("/no/such/file.json", "neither a JSON key nor the path"),
        ('{"type": "authorized_user"}', "not a service account's"),
        ('{"type": "service_account", "token_uri": "http://evil.example.com/"}', "not an https address"),
        (
            '{"type": "service_account", "token_uri": "https://x.example/", "client_email": "a@b.c",'
            ' "private_key": "CANARY"}',
            "damaged",
        ),
    ],
)
def test_a_damaged_key_is_reported_without_quoting_it(tmp_path: Path, key: str, said: str) -> None:
    options = GoogleDriveOptions(service_account_key=key, my_drive=True)
    with pytest.raises(Misconfigured, match=said) as caught:
        GoogleDrive(options, Context(name="drive", tenant="t", memory=InMemory(), folder=tmp_path))
    document: BaseException | None = caught.value
    while document is not None:
        assert "CANARY" not in str(document)
        document = document.__cause__


async def test_the_key_may_be_the_path_of_a_file(desk: Desk) -> None:
    (file := desk.folder / "key.json").write_text(desk.key)
    source = desk.source(drives=[desk.drive()], service_account_key=str(file))
    assert await said(source) == []


async def test_the_playgrounds_options_are_valid_in_a_settings_file(tmp_path: Path) -> None:
    async with playing() as playground:
        options = declared_options(GoogleDrive, playground.options, "drive", playground.environment)
        source = GoogleDrive(options, Context(name="drive", tenant="t", memory=InMemory(), folder=tmp_path))
        try:
            assert await source.check() == []
        finally:
            await source.close()


async def test_no_secret_is_in_any_log_message_or_repr(desk: Desk, capfd: pytest.CaptureFixture[str]) -> None:
    drive = desk.drive()
    desk.doc("Document", drive)
    source = desk.source(drives=[drive], patient=False)
    texts: list[str] = [repr(source._options), repr(source._api.drive_auth), repr(vars(source._api))]
    with structlog.testing.capture_logs() as logs:
        await everything(source)
        desk.fake.faults.failing = 1
        with pytest.raises(PenstockError) as failed:
            await everything(source)
        desk.fake.tokens.issued.clear()
        desk.corpus.users.pop(ACCOUNT)
        with pytest.raises(PenstockError) as refused:
            await everything(source)
        texts += [str(failed.value), str(refused.value), repr(await source.check()), repr(logs)]
    texts += list(capfd.readouterr())
    private = json.loads(desk.key)["private_key"].splitlines()[1]
    for secret in (private, "ya29.", "eyJ", "Bearer "):
        assert not any(secret in text for text in texts)
