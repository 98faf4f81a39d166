"""Settings: what they select, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from connectors.github import GitHubOptions

KEY = {"app_id": 1, "installation_id": 2, "private_key": "k"}


def options(**fields: Any) -> GitHubOptions:
    return GitHubOptions(**{"token": "t", **fields})


@pytest.mark.parametrize(
    ("fields", "selected", "others"),
    [
        ({"organization": "Acme"}, ["acme/a", "ACME/b"], ["acme2/a", "other/acme"]),
        ({"repositories": ["acme/docs-*"]}, ["acme/docs-1", "Acme/Docs-2"], ["acme/docs", "other/docs-1"]),
        ({"organization": "acme", "exclude": ["acme/secret*"]}, ["acme/a"], ["acme/secrets", "Acme/SECRET"]),
        ({"organization": "acme", "repositories": ["other/one"]}, ["acme/a", "other/one"], ["other/two"]),
    ],
)
def test_repositories_are_selected_whatever_the_case(
    fields: dict[str, Any], selected: list[str], others: list[str]
) -> None:
    chosen = options(**fields)
    assert [name for name in selected + others if chosen.is_selected(name)] == selected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"organization": "acme", "kinds": ["wikis"], "api_url": "http://127.0.0.1:1"}, "wikis are read over https"),
        ({}, "nothing to read"),
        ({"organization": "acme", "token": None}, "no credential"),
        ({"organization": "acme", "token": None, "app_id": 1}, "no credential"),
        ({"organization": "acme", **KEY}, "two credentials"),
        ({"organization": "acme", "api_url": "http://github.acme.example/api/v3"}, "not an https address"),
        ({"repositories": ["handbook"]}, "pattern"),
        ({"repositories": ["*/handbook"]}, "pattern"),
        ({"organization": "acme", "public_acl_tags": ["repository:1"]}, "rename it"),
        ({"organization": "acme", "unknown": 1}, "Extra inputs"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        options(**fields)


def test_an_app_is_a_credential() -> None:
    assert options(organization="acme", token=None, **KEY).app_id == 1


@pytest.mark.parametrize(
    ("fields", "website"),
    [
        ({}, "https://github.com"),
        ({"api_url": "https://github.acme.example/api/v3/"}, "https://github.acme.example"),
        ({"api_url": "https://api.acme.ghe.example"}, "https://acme.ghe.example"),
        ({"api_url": "https://gateway.example/hub", "web_url": "https://hub.example/"}, "https://hub.example"),
    ],
)
def test_wikis_are_read_below_the_address_of_the_website(fields: dict[str, Any], website: str) -> None:
    assert options(organization="acme", kinds=["wikis"], **fields).website == website
