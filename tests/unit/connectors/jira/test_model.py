"""Holders of permissions, issues, and what may be said of restrictions."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from connectors.jira import JiraOptions
from connectors.jira.access import NOBODY, access_of, comment_tags
from connectors.jira.content import parts, split_id
from connectors.jira.model import Comment, Holders, Issue, Project, Rules, comment, holders, issue, project

OPTIONS = JiraOptions(base_url="https://acme.atlassian.net", token=SecretStr("x"))
DATA_CENTER = JiraOptions(base_url="https://jira.acme.example", token=SecretStr("x"), flavour="data-center")
PROJECT = Project("10000", "ENG", "Engineering")
DESK = Project("10000", "DESK", "Desk", is_service_desk=True)


def issue_json(**fields: Any) -> dict[str, Any]:
    """An issue as Jira returns it."""
    return {
        "id": "10100",
        "key": "ENG-1",
        "fields": {
            "summary": "A",
            "project": {"id": "10000", "key": "ENG"},
            "updated": "2026-05-23T14:47:28.592+0000",
            **fields,
        },
    }


def make(**fields: Any) -> Issue:
    return issue(issue_json(**fields))


def said(**fields: Any) -> Comment:
    return comment({"id": "1", "body": "b", "created": "2026-05-23T14:47:28.592+0000", **fields})


def test_every_type_of_holder_is_parsed_and_an_unknown_one_is_named() -> None:
    parsed = holders(
        [
            {"type": "user", "parameter": "u1", "value": "u1"},
            {"type": "user", "parameter": "x", "user": {"accountId": "u2"}},
            {"type": "group", "parameter": "Old name", "value": "g-id"},
            {"type": "group", "parameter": "by-name"},
            {"type": "projectRole", "parameter": "10002"},
            {"type": "applicationRole", "parameter": "jira-software"},
            {"type": "applicationRole"},
            {"type": "reporter"},
            {"type": "assignee"},
            {"type": "userCustomField", "parameter": "customfield_1"},
            {"type": "groupCustomField", "parameter": "customfield_2"},
            {"type": "projectLead"},
            {"type": "anyone"},
            {"type": "sd.customer.portal.only"},
            {"type": "organisation"},
        ]
    )
    assert parsed == Holders(
        users=frozenset({"u1", "u2"}),
        groups=frozenset({"g-id", "by-name"}),
        roles=frozenset({"10002"}),
        applications=frozenset({"jira-software", ""}),
        fields=frozenset({"reporter", "assignee", "customfield_1", "customfield_2"}),
        has_lead=True,
        has_anyone=True,
        unknown=frozenset({"organisation"}),
    )


@pytest.mark.parametrize("type", ["user", "group", "projectRole", "userCustomField", "groupCustomField"])
def test_a_holder_that_names_nobody_admits_nobody(type: str) -> None:
    assert holders([{"type": type}]) == Holders(unknown=frozenset({type}))


@pytest.mark.parametrize(
    ("restriction", "expected"),
    [
        (None, ("browse:10000",)),
        ({"issuerestrictions": {}, "shouldDisplay": True}, ("browse:10000",)),
        ({"issuerestrictions": {"projectrole": [10003, "10002"]}}, ("browse:10000", "restriction:10000:10002,10003")),
        ({"issuerestrictions": {"projectrole": [{"id": "10002"}]}}, ("browse:10000", "restriction:10000:10002")),
        ({"issuerestrictions": {"projectrole": []}}, None),
        ({"issuerestrictions": {"team": [1]}}, None),
        ({"issuerestrictions": {"projectrole": [1], "team": [1]}}, None),
        ({"issuerestrictions": {"projectrole": ["Admins"]}}, None),
        ({"issuerestrictions": [1]}, None),
        ("secret", None),
    ],
)
def test_a_restriction_that_is_not_understood_admits_nobody(restriction: Any, expected: tuple[str, ...] | None) -> None:
    access = access_of(make(issuerestriction=restriction), Rules(), OPTIONS)
    assert (access == NOBODY) if expected is None else ((*access.acl_tags, *access.required_tags) == expected)


@pytest.mark.parametrize("level", [{}, "10", {"id": None}, {"id": "x"}])
def test_a_security_level_that_cannot_be_parsed_is_an_error_and_not_none(level: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        make(security=level)


def test_a_level_admits_its_members_and_people_whom_fields_of_the_issue_name() -> None:
    rules = Rules(levels={"7": Holders(fields=frozenset({"reporter", "customfield_1"}))})
    people = {"accountId": "1", "displayName": "Ann", "emailAddress": "Ann@Acme.example"}
    one = make(security={"id": "7"}, reporter=people, customfield_1=[{"name": "Devs", "groupId": "g-1"}])
    assert access_of(one, rules, OPTIONS).required_tags == (
        "level:10000:7 customfield_1=group:g-1 reporter=ann@acme.example",
    )
    assert access_of(one, Rules(), OPTIONS).required_tags == ("level:10000:7",)
    assert access_of(one, rules, DATA_CENTER).required_tags == ("issue:10100",)


def test_people_who_do_not_fit_into_a_tag_are_left_out() -> None:
    rules = Rules(levels={"7": Holders(fields=frozenset({"customfield_1"}))})
    many = [{"accountId": str(n), "displayName": "A", "emailAddress": f"{n}@acme.example"} for n in range(99)]
    one = make(security={"id": "7"}, customfield_1=many)
    assert access_of(one, rules, OPTIONS).required_tags == ("level:10000:7",)
    spaced = make(security={"id": "7"}, customfield_1={"name": "All staff"})
    assert access_of(spaced, rules, OPTIONS).required_tags == ("level:10000:7",)


def test_people_who_cannot_log_in_hold_nothing_by_a_field() -> None:
    rules = Rules(browse=Holders(fields=frozenset({"reporter"})))
    for more in ({"active": False}, {"accountType": "customer"}, {"accountType": "app"}):
        person = {"accountId": "1", "displayName": "Ann", "emailAddress": "ann@acme.example", **more}
        assert access_of(make(reporter=person), rules, OPTIONS).acl_tags == ("browse:10000",)


@pytest.mark.parametrize(
    ("fields", "where", "expected"),
    [
        ({}, PROJECT, ()),
        ({"jsdPublic": True}, DESK, ()),
        ({"jsdPublic": False}, DESK, ("agents:10000",)),
        ({}, DESK, ("agents:10000",)),
        ({"jsdPublic": "true"}, DESK, ("agents:10000",)),
        ({"jsdPublic": False}, PROJECT, ("agents:10000",)),
        ({"visibility": {"type": "role", "value": "Devs", "identifier": "10002"}}, PROJECT, ("role:10000:10002",)),
        ({"visibility": {"type": "role", "value": "Devs"}}, PROJECT, ("role:10000:10005",)),
        ({"visibility": {"type": "role", "value": "Gone"}}, PROJECT, None),
        ({"visibility": {"type": "group", "value": "devs", "identifier": "g-1"}}, PROJECT, ("group:g-1",)),
        ({"visibility": {"type": "group", "value": "devs"}}, PROJECT, ("group:devs",)),
        ({"visibility": {"type": "group"}}, PROJECT, None),
        ({"visibility": {"type": "team", "value": "devs"}}, PROJECT, None),
        ({"visibility": "devs"}, PROJECT, None),
        ({"visibility": {}}, PROJECT, ()),
        ({"visibility": {"type": "group", "value": "devs"}}, DESK, ("agents:10000", "group:devs")),
    ],
)
def test_who_may_read_a_comment(fields: dict[str, Any], where: Project, expected: tuple[str, ...] | None) -> None:
    assert comment_tags(said(**fields), where, Rules(roles={"Devs": "10005"})) == expected


@pytest.mark.parametrize("kind", ["service_desk", None, "something_new"])
def test_a_project_of_an_unknown_type_may_have_internal_comments(kind: str | None) -> None:
    assert project({"id": "1", "key": "A", **({"projectTypeKey": kind} if kind else {})}).is_service_desk


ATTACHED = [
    {"id": "5", "filename": "a.log", "size": 3, "created": "2026-05-23T14:47:28.592+0000"},
    {"id": "6", "filename": "b.log", "size": 3, "created": "2026-05-23T14:47:28.592+0000"},
    {"id": "7", "filename": "c.png", "size": 3, "created": "2026-05-23T14:47:28.592+0000", "mimeType": "image/png"},
]


def media(**attributes: Any) -> dict[str, Any]:
    return {"type": "doc", "content": [{"type": "mediaGroup", "content": [{"type": "media", "attrs": attributes}]}]}


@pytest.mark.parametrize(
    ("body", "restricted"),
    [
        ("Nothing attached. What a day!", set()),
        ("See !a.log! and !!", {"a.log"}),
        ("See !a.log|thumbnail! and [^b.log]", {"a.log", "b.log"}),
        (media(type="file", alt="a.log"), {"a.log"}),
        (media(type="file", id="some-id"), {"a.log", "b.log"}),
        (media(type="external", url="https://a.example/x.png"), set()),
        (float("inf"), {"a.log", "b.log"}),
        (None, set()),
    ],
)
def test_a_file_that_a_restricted_comment_shows_is_as_restricted(body: Any, restricted: set[str]) -> None:
    for visibility, expected in (("group", ("group:devs",)), ("unknown", None)):
        one = make(
            attachment=ATTACHED,
            comment={
                "comments": [
                    {
                        "id": "1",
                        "body": body,
                        "created": "2026-05-23T14:47:28.592+0000",
                        "visibility": {"type": visibility, "value": "devs"},
                    }
                ]
            },
        )
        files = [part for part in parts(one, PROJECT, Rules(), OPTIONS) if part.attachment]
        assert [part.attachment.name for part in files if part.attachment] == ["a.log", "b.log"]
        for part in files:
            assert part.attachment is not None
            if part.attachment.name not in restricted:
                assert (part.access.acl_tags, part.access.required_tags) == (("browse:10000",), ())
            elif expected is None:
                assert part.access == NOBODY
            else:
                assert part.access.required_tags == expected


def test_comments_are_looked_into_once_for_all_files() -> None:
    """They were for each file: an issue with a thousand of both kept all connectors from their turns for minutes."""

    class Body(dict[str, Any]):
        reads = 0

        def get(self, *arguments: Any) -> Any:
            Body.reads += 1
            return super().get(*arguments)

    at = "2026-05-23T14:47:28.592+0000"
    files = [{"id": str(n), "filename": f"{n}.log", "size": 3, "created": at} for n in range(50)]
    hidden = {"id": "1", "body": Body(type="doc"), "created": at, "visibility": {"type": "unknown"}}
    one = make(attachment=files, comment={"comments": [hidden]})
    assert len(parts(one, PROJECT, Rules(), OPTIONS)) == 51
    assert 0 < Body.reads < 10


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("10100", "10100"),
        ("10100/attachment/5", "10100"),
        ("10100/comments/group:a/b", "10100"),
        ("10100/other/5", None),
        ("ENG-1", None),
        ("", None),
        ("١", None),
    ],
)
def test_ids_of_other_sources_are_not_ours(id: str, expected: str | None) -> None:
    assert split_id(id) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"flavour": "data-center", "email": "a@acme.example"},
        {"email_domain": "acme.example"},
        {"projects": ["ENG"], "unknown": 1},
        {"projects": ['ENG" OR project = "HR']},
    ],
)
def test_options_that_do_not_fit_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        JiraOptions.model_validate({"base_url": "https://a.example", "token": "x", **fields})
