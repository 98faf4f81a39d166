"""Whom a permission of Graph lets read.

Recorded payloads: microsoftgraph/microsoft-graph-docs-contrib (api-reference/v1.0/resources/permission.md, CC BY 4.0),
pnp/cli-microsoft365 (src/m365/spo/commands/group, MIT), and learn.microsoft.com/answers 1656607, trimmed.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from connectors.sharepoint.access import EVERYONE, Sharing, access_of, principal_of, tag_of_login, tags_of

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SITE = "c0ffee00-0000-4000-8000-000000000001"
USER = "1b37d2e1-5000-4648-b431-7dfa509b5660"
GROUP = "27ae47f1-48f1-46f3-980b-d3c1470e398d"
OPEN = Sharing(organization_links=True, anonymous_links=True)


def granted(*, to: dict[str, Any] | None = None, roles: Any = ("read",), **more: Any) -> dict[str, Any]:
    return {"id": "1", "roles": list(roles), **({"grantedToV2": to} if to else {}), **more}


def person(login: str = "i:0#.f|membership|ines@contoso.com") -> dict[str, Any]:
    return {"user": {"id": USER, "displayName": "Ines"}, "siteUser": {"id": "9", "loginName": login}}


def entra_group(login: str | None) -> dict[str, Any]:
    known = {"siteUser": {"id": "11", "loginName": login}} if login else {}
    return {"group": {"id": GROUP, "displayName": "Marketing"}, **known}


FEDERATED = f"c:0o.c|federateddirectoryclaimprovider|{GROUP}"


@pytest.mark.parametrize(
    ("permission", "tags"),
    [
        (granted(to=person()), {f"account:{USER}"}),
        (granted(to={"user": {"id": USER}}), {f"account:{USER}"}),
        (granted(to={"siteUser": {"loginName": "i:0#.f|membership|Ines@Contoso.com"}}), {"account:ines@contoso.com"}),
        (granted(to=entra_group(FEDERATED)), {f"group:{GROUP}"}),
        (granted(to=entra_group(f"c:0t.c|tenant|{GROUP}")), {f"group:{GROUP}"}),
        (granted(to=entra_group(None)), {f"group:{GROUP}"}),
        # The owners of a group are shown with the id of the whole group.
        (granted(to=entra_group(f"{FEDERATED}_o")), {f"owners:{GROUP}"}),
        (granted(to={"siteUser": {"loginName": "c:0(.s|true"}}), {EVERYONE}),
        (granted(to={"siteUser": {"loginName": f"c:0-.f|rolemanager|spo-grid-all-users/{GROUP}"}}), {EVERYONE}),
        (granted(to={"siteGroup": {"id": "6", "loginName": "Team Members"}}), {f"site-group:{SITE}:6"}),
        (granted(to=person(), roles=["sp.full control"]), {f"account:{USER}"}),
        (granted(to=person(), roles=["sp.limited access", "read"]), {f"account:{USER}"}),
        (granted(to=person(), expirationDateTime="0001-01-01T00:00:00Z"), {f"account:{USER}"}),
        (
            granted(link={"scope": "users"}, grantedToIdentitiesV2=[person(), entra_group(FEDERATED)]),
            {f"account:{USER}", f"group:{GROUP}"},
        ),
    ],
)
def test_a_permission_names_everybody_who_may_read(permission: dict[str, Any], tags: set[str]) -> None:
    assert access_of([permission], SITE, Sharing(), NOW).tags == tags


@pytest.mark.parametrize(
    "permission",
    [
        granted(to=person(), roles=[]),
        granted(to=person(), roles=["sp.limited access"]),
        granted(to=person(), roles=["sp.restricted read"]),
        granted(to=person(), roles=["a level of our own"]),
        {"id": "1", "grantedToV2": person()},
        granted(to=person(), hasPassword=True),
        granted(to=person(), expirationDateTime="2026-11-21T11:59:59Z"),
        granted(to=person(), expirationDateTime="tomorrow"),
        granted(to=person("i:0#.f|membership|urn%3aspo%3aguest#bob@example.com")),
        granted(to=person("i:0i.t|00000003-0000-0ff1-ce00-000000000000|app@sharepoint")),
        granted(to=entra_group(f"{FEDERATED}_x")),
        granted(to=entra_group("c:0+.w|s-1-5-21-2077504941-3110522328-3205064618-7775")),
        granted(to={"user": {"id": "5D33DD65C6932946"}}),
        granted(to={"group": {"id": "Marketing"}}),
        granted(to={"application": {"id": USER}}),
        granted(to={"device": {"id": USER}}),
        granted(to={"siteGroup": {"id": "../6"}}),
        granted(invitation={"email": "jd@example.com", "signInRequired": True}),
        # Only the deprecated property, in which a group looks like a user.
        granted(grantedTo={"user": {"id": USER, "displayName": "Marketing"}}),
        granted(to="Ines"),  # type: ignore[arg-type]
        granted(grantedToIdentitiesV2={"user": {"id": USER}}),
        granted(link={"scope": "organization", "type": "view"}),
        granted(link={"scope": "anonymous", "type": "view"}),
        granted(link={"scope": "existingAccess", "type": "view"}),
    ],
)
def test_what_is_uncertain_lets_nobody_read(permission: dict[str, Any]) -> None:
    assert access_of([permission], SITE, Sharing(), NOW).tags == set()


@pytest.mark.parametrize("scope", ["organization", "anonymous"])
def test_open_links_count_for_everybody_only_where_the_options_say_so(scope: str) -> None:
    link = granted(link={"scope": scope, "type": "view"})
    assert tags_of(link, SITE, OPEN) == {EVERYONE}
    only = Sharing(organization_links=scope == "organization", anonymous_links=scope == "anonymous")
    other = Sharing(organization_links=scope != "organization", anonymous_links=scope != "anonymous")
    assert tags_of(link, SITE, only) == {EVERYONE}
    assert tags_of(link, SITE, other) == set()


def test_no_option_opens_a_link_that_grants_nothing() -> None:
    assert tags_of(granted(link={"scope": "existingAccess"}), SITE, OPEN) == set()
    assert tags_of(granted(link={"scope": "anonymous"}, hasPassword=True), SITE, OPEN) == set()


def test_the_first_end_of_a_grant_is_the_end_of_the_access() -> None:
    later = granted(to=person(), expirationDateTime="2026-12-01T00:00:00Z")
    sooner = granted(to=entra_group(None), expirationDateTime="2026-11-22T00:00:00Z")
    access = access_of([later, sooner, granted(to=entra_group(FEDERATED))], SITE, Sharing(), NOW)
    assert access.tags == {f"account:{USER}", f"group:{GROUP}"}
    assert access.expires_at == datetime(2026, 11, 22, tzinfo=UTC)


# https://learn.microsoft.com/en-us/graph/api/resources/permission
DOCUMENTED: list[tuple[dict[str, Any], set[str]]] = [
    (
        {
            "id": "3",
            "grantedToIdentitiesV2": [
                {
                    "user": {"id": USER, "displayName": "Misty Suarez"},
                    "siteUser": {"id": "1", "loginName": "Misty Suarez"},
                },
                {"user": {"id": "9397721fh4hgh73"}, "siteUser": {"id": "2", "loginName": "Judith Clemons"}},
            ],
            "roles": ["write"],
            "link": {"webUrl": "https://contoso.sharepoint.com/:w:/t/design/a577ghg9"},
            "expirationDateTime": "0001-01-01T00:00:00Z",
        },
        {f"account:{USER}"},
    ),
    (
        {
            "id": "1",
            "roles": ["write"],
            "invitation": {"email": "jd@example.com", "signInRequired": True},
            "shareId": "FWxc1lasfdbEAGM5fI7B67aB5ZMPDMmQ11U",
            "expirationDateTime": "0001-01-01T00:00:00Z",
        },
        set(),
    ),
    (
        {
            "id": "00000000-0000-0000-0000-000000000000",
            "roles": ["read"],
            "link": {"scope": "existingAccess", "type": "view"},
            "expirationDateTime": "0001-01-01T00:00:00Z",
        },
        set(),
    ),
    (
        {
            "@deprecated.GrantedTo": "GrantedTo has been deprecated. Refer to GrantedToV2",
            "id": "SOME-SHARE-ID",
            "roles": ["write"],
            "grantedToV2": {
                "siteGroup": {
                    "@odata.type": "#microsoft.graph.sharePointIdentity",
                    "displayName": "SOME DISPLAY NAME",
                    "id": "6",
                    "loginName": "SOME DISPLAY NAME",
                }
            },
            "grantedTo": {"user": {"displayName": "SOME DISPLAY NAME"}},
            "inheritedFrom": {},
        },
        {f"site-group:{SITE}:6"},
    ),
]


@pytest.mark.parametrize(("permission", "tags"), DOCUMENTED)
def test_recorded_permissions_are_read(permission: dict[str, Any], tags: set[str]) -> None:
    assert access_of([permission], SITE, Sharing(), NOW).tags == tags


@pytest.mark.parametrize(
    ("login", "tag"),
    [
        ("i:0#.f|membership|Alex.Wilber@contoso.com", "account:alex.wilber@contoso.com"),
        (
            "i:0#.f|membership|bob_example.com#ext#@contoso.onmicrosoft.com",
            "account:bob_example.com#ext#@contoso.onmicrosoft.com",
        ),
        (f"c:0o.c|federateddirectoryclaimprovider|{GROUP}", f"group:{GROUP}"),
        (f"c:0t.c|tenant|{GROUP}", f"group:{GROUP}"),
        ("i:0#.w|contoso\\bpalmer", None),
        ("SHAREPOINT\\system", None),
        ("i:0#.f|membership|urn:spo:anon#abc", None),
        ("c:0-.f|rolemanager|somebody", None),
        ("i:0#.f|membership|", None),
        ("", None),
    ],
)
def test_claims_of_sharepoint_are_read(login: str, tag: str | None) -> None:
    assert tag_of_login(login) == tag


def test_a_principal_is_the_mail_of_an_enabled_account() -> None:
    user = {"mail": "Ines@Contoso.com", "userPrincipalName": "i@contoso.onmicrosoft.com", "accountEnabled": True}
    assert principal_of(user, "mail") == "ines@contoso.com"
    assert principal_of(user, "userPrincipalName") == "i@contoso.onmicrosoft.com"
    assert principal_of({**user, "mail": None}, "mail") == "i@contoso.onmicrosoft.com"
    assert principal_of({**user, "accountEnabled": False}, "mail") is None
    assert principal_of({"mail": "ines@contoso.com"}, "mail") is None
