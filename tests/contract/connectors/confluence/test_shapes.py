"""Everything that the fake answers to the source, against the published descriptions.

Written down from Atlassian's OpenAPI documents (developer.atlassian.com/cloud/confluence/swagger.v3.json and
…/openapi-v2.v3.json) and, for Data Center, developer.atlassian.com/server/confluence/rest/: the names and types of the
fields that are there, and no others, so that the fake invents nothing that the source could come to lean on.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from connectors.fakes.confluence import Flavour
from tests.support.connectors.confluence_kit import FLAVOURS, Wiki, wiki

TEXT: Any = {"type": "string"}
MAYBE: Any = {"type": ["string", "null"]}
NUMBER: Any = {"type": "integer"}
TIME: Any = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}(Z|[+-]\d\d:?\d\d)$"}
DIGITS: Any = {"type": "string", "pattern": r"^\d+$"}


def exactly(required: str, optional: str = "", /, **fields: Any) -> Any:
    """An object of these fields. required, optional: names."""
    needed, allowed = required.split(), {*required.split(), *optional.split()}
    properties = {name: fields.get(name, {}) for name in allowed}
    assert set(fields) <= allowed
    return {"type": "object", "required": needed, "properties": properties, "additionalProperties": False}


def some(site: Any) -> Any:
    return {"type": "array", "items": site}


# v2

VERSION_2 = exactly("createdAt message number minorEdit authorId", createdAt=TIME, number=NUMBER, authorId=TEXT)
BODY_2 = exactly(
    "", "storage", storage=exactly("representation value", representation={"const": "storage"}, value=TEXT)
)
LINKS_2 = exactly("webui", "editui tinyui download", webui=TEXT)
PAGE = exactly(
    "id status title spaceId parentId parentType authorId createdAt version body _links",
    "position ownerId lastOwnerId subtype",
    id=DIGITS,
    spaceId=DIGITS,
    parentId=MAYBE,
    createdAt=TIME,
    version=VERSION_2,
    body=BODY_2,
    _links=LINKS_2,
    parentType={"enum": ["page", "whiteboard", "database", "embed", "folder", None]},
    status={"enum": ["current", "archived", "deleted", "trashed"]},
)
BLOG_POST = exactly(
    "id status title spaceId authorId createdAt version body _links",
    id=DIGITS,
    spaceId=DIGITS,
    version=VERSION_2,
    body=BODY_2,
    _links=LINKS_2,
)
COMMENT = exactly(
    "id status title version body _links",
    "pageId blogPostId parentCommentId resolutionStatus properties",
    id=DIGITS,
    version=VERSION_2,
    body=BODY_2,
    properties=exactly("inlineMarkerRef inlineOriginalSelection"),
    resolutionStatus={"enum": ["open", "reopened", "resolved", "dangling"]},
)
ATTACHMENT = exactly(
    "id status title createdAt mediaType fileId fileSize downloadLink version _links",
    "pageId blogPostId customContentId mediaTypeDescription comment webuiLink",
    id={"type": "string", "pattern": r"^att\d+$"},
    fileSize=NUMBER,
    version=VERSION_2,
    _links=LINKS_2,
)
SPACE_2 = exactly(
    "id key name type status authorId createdAt homepageId description icon _links",
    id=DIGITS,
    key=TEXT,
    type={"enum": ["global", "collaboration", "knowledge_base", "personal"]},
)
PERMISSION = exactly(
    "id principal operation",
    principal=exactly("type id", type={"enum": ["user", "group", "role"]}, id=TEXT),
    operation=exactly("key targetType", targetType={"enum": ["page", "blogpost", "comment", "attachment", "space"]}),
)
ASSIGNMENT = exactly(
    "principal roleId",
    principal=exactly("principalType principalId", principalType={"enum": ["USER", "GROUP", "ACCESS_CLASS"]}),
    roleId=TEXT,
)
ROLE = exactly(
    "id type name description spacePermissions",
    type={"enum": ["SYSTEM", "CUSTOM"]},
    spacePermissions={"type": "array", "items": TEXT},
)
ANCESTOR = exactly("id type", id=DIGITS, type=TEXT)
USER_2 = exactly(
    "displayName timeZone personalSpaceId isExternalCollaborator accountStatus accountId email accountType publicName",
    "profilePicture _links",
    accountId=TEXT,
    email=MAYBE,
)


def many_2(site: Any) -> Any:
    links = exactly("", "next base", next={"type": "string", "pattern": r"^/wiki/api/v2/.*cursor="})
    return exactly("results _links", results=some(site), _links=links)


# v1

USER_CLOUD = exactly(
    "type accountId accountType email publicName displayName isExternalCollaborator _links",
    "timeZone profilePicture _expandable",
    type={"enum": ["known", "unknown", "anonymous", "user"]},
    email=TEXT,
)
USER_DC = exactly("type username userKey displayName _links", "profilePicture _expandable", type={"const": "known"})
GROUP_CLOUD = exactly("type name id _links", "_expandable", type={"const": "group"})
GROUP_DC = exactly("type name _links", "_expandable", type={"const": "group"})


def v1(*, cloud: bool) -> dict[str, Any]:
    user, group = (USER_CLOUD, GROUP_CLOUD) if cloud else (USER_DC, GROUP_DC)
    link = {"type": "string", "pattern": r"^/rest/api/"}
    links = exactly("self", "next prev base context", next=link)

    def many(site: Any) -> Any:
        return exactly(
            "results start limit size _links", results=some(site), start=NUMBER, limit=NUMBER, size=NUMBER, _links=links
        )

    def part(site: Any) -> Any:
        return exactly("results start limit size", results=some(site))

    restriction = exactly(
        "operation restrictions _expandable _links",
        "content",
        operation={"enum": ["read", "update", "use"]},
        restrictions=exactly("", "user group _expandable", user=part(user), group=part(group)),
    )
    space = exactly("id key name type status _links", "_expandable", id=NUMBER)
    version = exactly(
        "by when number message minorEdit", "_expandable _links hidden", when=TIME, number=NUMBER, by=user
    )
    content: dict[str, Any] = exactly(
        "id type status title _expandable _links",
        "space version history body ancestors container restrictions children descendants extensions metadata",
        id={"type": "string", "pattern": r"^(att)?\d+$"},
        version=version,
        space=space,
        type={"enum": ["page", "blogpost", "comment", "attachment"]},
        history=exactly("latest createdBy createdDate _links", createdBy=user, createdDate=TIME),
        body=exactly("", "storage", storage=exactly("value representation")),
        ancestors=some({"$ref": "#/$defs/content"}),
        container={"anyOf": [{"$ref": "#/$defs/content"}, space]},
        restrictions=exactly("", "read update", read=restriction, update=restriction),
        children=exactly("", "attachment comment", attachment=many({"$ref": "#/$defs/content"})),
        descendants=exactly("", "comment", comment=many({"$ref": "#/$defs/content"})),
    )
    nested = {"$defs": {"content": content}}
    entry = exactly(
        "operation subject spaceKey spaceId",
        operation=exactly("targetType operationKey"),
        subject=exactly("type", "name userKey"),
    )
    return {
        r"content/search": {**many({"$ref": "#/$defs/content"}), **nested},
        r"content": {**many({"$ref": "#/$defs/content"}), **nested},
        r"content/(att)?\d+": {**content, **nested},
        r"content/\d+/(child|descendant)/\w+": {**many({"$ref": "#/$defs/content"}), **nested},
        r"content/\d+/restriction/byOperation/read": restriction,
        r"user/current": user,
        r"user": user,
        r"group/[^/]+/(member|membersByGroupId)": many(user),
        r"space": many(space),
        r"space/[^/]+/permissions": some(entry),
    }


V2 = {
    r"spaces": many_2(SPACE_2),
    r"spaces/\d+/permissions": many_2(PERMISSION),
    r"spaces/\d+/role-assignments": many_2(ASSIGNMENT),
    r"space-roles": many_2(ROLE),
    r"(spaces/\d+/)?pages": many_2(PAGE),
    r"(spaces/\d+/)?blogposts": many_2(BLOG_POST),
    r"(pages|folders)/\d+/ancestors": exactly("results _links", results=some(ANCESTOR)),
    r"\w+/\d+/(footer|inline)-comments": many_2(COMMENT),
    r"(footer|inline)-comments/\d+/children": many_2(COMMENT),
    r"attachments/att\d+": ATTACHMENT,
    r"users-bulk": many_2(USER_2),
}


async def requests_of_every_operation(site: Wiki) -> list[str]:
    """Return every request of a source that uses all of its operations: method and path with query, each once."""
    top = site.page("Top")
    folder = site.page("Folder", parent=top.id, kind="folder") if site.fake.cloud else top
    page = site.page("Below", parent=folder.id)
    said = site.state.add_comment(page.id, "<p>Hm.</p>", selection="Below")
    site.state.add_comment(page.id, "<p>Well.</p>", parent=said.id, selection="Below")
    for n in range(30):
        site.state.add_comment(top.id, f"<p>{n}</p>")
        site.state.attach(top.id, f"{n}.txt", b"words", "text/plain")
    post = site.page("News", kind="blogpost")
    site.state.add_comment(post.id, "<p>So?</p>")
    site.state.restrict(top.id, users={site.bot.account_id}, groups={"staff"})
    site.state.trash(site.page("Thrown away").id)
    site.state.roles = {"viewer": ("read/space",)}
    site.state.spaces["ENG"].assignments = [
        ("GROUP", "staff", "viewer"),
        ("ACCESS_CLASS", "all-licensed-users", "viewer"),
    ]
    await site.source.check()
    cursor = await site.source.start()
    await site.full()
    await site.slim()
    await site.changes(cursor)
    await site.groups()
    await site.source.fetch([page.id, post.id, next(iter(site.state.contained(top.id, "attachment"))).id])
    await site.events()
    return list(dict.fromkeys(site.fake.requests))


@pytest.mark.parametrize("flavour", ["cloud", pytest.param("data-center", marks=pytest.mark.slow)])
async def test_the_fakes_responses_match_the_published_schemas(tmp_path: Path, flavour: Flavour) -> None:
    from jsonschema import Draft202012Validator  # here, because its import takes a second

    async with wiki(flavour, tmp_path) as site:
        requests = await requests_of_every_operation(site)
        token = next(iter(site.fake.credentials))
        met: set[str] = set()
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}) as client:
            for line in requests:
                method, _, path = line.partition(" ")
                if "download" in path or "/media/" in path:
                    continue
                ids = {"accountIds": [user.account_id for user in site.state.users.values()]}
                answer = await client.request(method, site.url + path, json=ids if method == "POST" else None)
                assert answer.status_code == 200, (line, answer.text)
                api, name = re.match(r"/(rest/api|api/v2)/([^?]*)", path).groups()  # type: ignore[union-attr]
                schemas = V2 if api == "api/v2" else v1(cloud=site.fake.cloud)
                fitting = [pattern for pattern in schemas if re.fullmatch(pattern, name)]
                assert len(fitting) == 1, f"nothing is pinned for {line}"
                met.add(fitting[0])
                Draft202012Validator.check_schema(schemas[fitting[0]])
                errors = sorted(Draft202012Validator(schemas[fitting[0]]).iter_errors(answer.json()), key=str)
                assert not errors, (line, errors[0].message, list(errors[0].absolute_path))
        assert len(met) >= 9, met


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_the_fakes_error_responses_match_the_published_ones(tmp_path: Path, flavour: Flavour) -> None:
    async with wiki(flavour, tmp_path) as site:
        token = site.fake.token_for(site.bot)
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}) as client:
            lost = await client.get(f"{site.url}/rest/api/content/999/restriction/byOperation/read")
            assert lost.status_code == 404
            assert lost.json()["statusCode"] == 404
            wrong = await client.get(f"{site.url}/rest/api/content/search", params={"cql": "nonsense = 1"})
            assert wrong.status_code == 400
            assert "Could not parse cql" in wrong.json()["message"]
            nobody = await client.get(f"{site.url}/rest/api/user/current", headers={"authorization": ""})
            assert nobody.status_code == 401
            if site.fake.cloud:
                stale = await client.get(f"{site.url}/api/v2/spaces", params={"cursor": "made-up"})
                assert stale.status_code == 400
                assert stale.json()["errors"][0]["status"] == 400
                gone = await client.get(f"{site.url}/rest/api/content", params={"spaceKey": "ENG"})
                assert gone.status_code == 404  # Cloud has taken v1's listings away
            else:
                assert (await client.get(f"{site.url}/api/v2/pages")).status_code == 404
                assert (await client.get(f"{site.url}/rest/api/user/current", auth=("bot", token))).status_code == 401


async def test_the_fake_hides_a_restricted_page_from_other_accounts(tmp_path: Path) -> None:
    async with wiki("cloud", tmp_path) as site:
        page = site.page("Secret")
        site.state.restrict(page.id, users={site.bob.account_id})
        token = site.fake.token_for(site.ann)
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}) as client:
            for path in (f"/api/v2/pages/{page.id}", f"/rest/api/content/{page.id}/restriction/byOperation/read"):
                assert (await client.get(site.url + path)).status_code == 404
            assert (await client.get(f"{site.url}/api/v2/pages")).json()["results"] == []
            response = await client.get(f"{site.url}/rest/api/content/search", params={"cql": "type = page"})
            assert response.json()["results"] == []
