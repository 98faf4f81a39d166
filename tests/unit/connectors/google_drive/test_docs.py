"""The guide names what the code has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from connectors import files
from connectors.google_drive import GoogleDriveOptions, content
from connectors.google_drive.client import DRIVE_SCOPE, MEMBER_SCOPE, USER_SCOPE

GUIDE = (Path(__file__).parents[4] / "docs/connectors/google-drive.md").read_text()
UNTOLD = {"service_account_key", "page_size", "sweep_page_size", "api_url", "directory_url"}


def test_the_guides_example_is_a_valid_settings_file() -> None:
    [example] = re.findall(r"```toml\n(.*?)```", GUIDE, re.S)
    table = tomllib.loads(example)["connector"]["drive"]
    assert (table.pop("kind"), table.pop("tenant")) == ("google-drive", "acme")
    GoogleDriveOptions(service_account_key="{}", **table)


def test_the_guide_explains_every_option_and_every_scope() -> None:
    names = set(re.findall(r"`?\b([a-z_]+)`?\b", GUIDE))
    assert set(GoogleDriveOptions.model_fields) - UNTOLD <= names
    for scope in (DRIVE_SCOPE, MEMBER_SCOPE, USER_SCOPE):
        assert f"`{scope}`" in GUIDE
    assert set(re.findall(r"https://www\.googleapis\.com/auth/[\w.]+\w", GUIDE)) == {
        DRIVE_SCOPE,
        MEMBER_SCOPE,
        USER_SCOPE,
    }


def test_the_guide_explains_every_code_of_unreadable_files() -> None:
    source = Path(content.__file__).read_text() + Path(files.__file__).read_text()
    codes = set(re.findall(r'NoText\("(\w+)"', source)) | {code for code, _ in content._REFUSALS.values()}
    assert {code for code in codes if f"`{code}`" not in GUIDE} == set()
