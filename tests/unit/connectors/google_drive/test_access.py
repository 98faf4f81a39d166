"""Permissions of Drive as tags: laws over made-up sharing, judged by an oracle that knows who really reads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from connectors.fakes.google_drive_corpus import FOLDER, Corpus, Grant
from connectors.fakes.google_drive_responses import file as shown_file
from connectors.fakes.google_drive_responses import permission as shown_permission
from connectors.google_drive.access import Sharing, expiry, own_access, shared_access, tag_of

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
STRICT = Sharing()
PEOPLE = ("ines@example.com", "otto@example.com", "sam@example.com", "guest@elsewhere.org")
GROUP = "staff@example.com"
BOT = "penstock@penstock-test.iam.gserviceaccount.com"


@pytest.mark.parametrize(
    ("permission", "tag"),
    [
        ({"type": "user", "emailAddress": "Ines@Example.com"}, "user:ines@example.com"),
        ({"type": "user"}, None),
        ({"type": "user", "emailAddress": ""}, None),
        ({"type": "user", "emailAddress": "ines@example.com", "deleted": True}, None),
        ({"type": "user", "emailAddress": "ines@example.com", "view": "metadata"}, None),
        ({"type": "user", "emailAddress": "ines@example.com", "view": "published"}, None),
        ({"type": "user", "emailAddress": "i@x.com", "expirationTime": "2026-11-21T12:00:01Z"}, "user:i@x.com"),
        ({"type": "user", "emailAddress": "i@example.com", "expirationTime": "2026-11-21T12:00:00Z"}, None),
        ({"type": "user", "emailAddress": "i@example.com", "expirationTime": "soon"}, None),
        ({"type": "group", "emailAddress": "staff@example.com"}, "group:staff@example.com"),
        ({"type": "domain", "domain": "Example.com", "allowFileDiscovery": True}, "domain:example.com"),
        ({"type": "domain", "domain": "example.com", "allowFileDiscovery": False}, None),
        ({"type": "domain", "domain": "example.com"}, None),
        ({"type": "domain", "allowFileDiscovery": True}, None),
        ({"type": "anyone", "allowFileDiscovery": True}, None),
        ({"type": "anyone"}, None),
        ({"type": "robot", "emailAddress": "ines@example.com"}, None),
        ({}, None),
    ],
)
def test_a_permission_becomes_its_tag_or_none(permission: dict[str, Any], tag: str | None) -> None:
    assert tag_of(permission, STRICT, NOW) == tag


def test_access_expires_with_its_first_ending_grant_and_ignores_expired_grants() -> None:
    def until(hours: int) -> dict[str, str]:
        return {
            "type": "user",
            "emailAddress": f"u{hours}@example.com",
            "expirationTime": (NOW + timedelta(hours=hours)).isoformat(),
        }

    access = own_access([until(5), until(-1), until(3), {"type": "user", "emailAddress": "x@example.com"}], STRICT, NOW)
    assert access.expires_at == NOW + timedelta(hours=3)
    assert access.tags == {"user:u5@example.com", "user:u3@example.com", "user:x@example.com"}
    assert expiry({"expirationTime": "2026-11-21T12:00:00"}) == NOW  # without an offset: Google's are in UTC


roles = st.sampled_from(["reader", "writer", "fileOrganizer", "organizer"])
grants = st.one_of(
    st.builds(Grant, type=st.just("group"), who=st.just(GROUP), role=roles),
    st.builds(Grant, type=st.just("user"), who=st.sampled_from(PEOPLE), role=roles),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("share"), st.sampled_from(["outer", "inner", "file"]), grants),
        st.tuples(st.just("limit"), st.sampled_from(["outer", "inner", "file"]), st.booleans()),
    ),
    max_size=8,
)


def read(corpus: Corpus, item: str, drive: str) -> frozenset[str]:
    def listed(id_: str) -> list[dict[str, Any]]:
        held = corpus.permissions(corpus.items[id_]).values()
        return [shown_permission(item, corpus, drive=drive, of_drive=id_ == drive) for item in held]

    shown = shown_file(corpus.items[item], corpus, BOT)
    return shared_access(shown, listed(item), listed(drive), drive, STRICT, NOW).tags


def holders(corpus: Corpus, tags: frozenset[str], drive: str) -> set[str]:
    results: set[str] = set()
    for tag in tags:
        kind, _, name = tag.partition(":")
        if kind == "user":
            results.add(name)
        elif kind == "group":
            results |= corpus.people_of(name)
        else:
            assert name == drive
            grants_ = (item.grant for held in corpus.permissions(corpus.items[drive]).values() for item in held)
            results |= holders(corpus, frozenset(f"{grant.type}:{grant.who}" for grant in grants_), drive)
    return results


@given(members=st.lists(grants, max_size=3), done=steps, newcomer=grants)
def test_tags_admit_exactly_the_readers_in_drive_and_never_more_after_someone_joins(
    members: list[Grant], done: list[tuple[Any, ...]], newcomer: Grant
) -> None:
    """A member who joins later may read less until the next sweep, and never more than Google permits. A member whose
    role changes by being shared with again is left to the sweep."""
    assume((newcomer.type, newcomer.who) not in {(member.type, member.who) for member in members})
    corpus = Corpus()
    for person in (*PEOPLE, BOT):
        corpus.user(person)
    corpus.group(GROUP, "sam@example.com")
    drive = corpus.drive("Drive", Grant(type="user", who=BOT, role="organizer"), *members)
    outer = corpus.add("Outer", parent=drive, mime_type=FOLDER).id
    inner = corpus.add("Inner", parent=outer, mime_type=FOLDER).id
    places = {"outer": outer, "inner": inner, "file": corpus.add("File", parent=inner).id}
    for step, where, what in done:
        if step == "share":
            corpus.share(places[where], what)
        else:
            corpus.limit(places[where], what)
    file = corpus.items[places["file"]]

    def able() -> set[str]:
        return {person for person in (*PEOPLE, BOT) if corpus.roles(person, file)}

    tags = read(corpus, file.id, drive)
    assert holders(corpus, tags, drive) == able()
    corpus.share(drive, newcomer)
    assert holders(corpus, tags, drive) <= able()
    assert holders(corpus, read(corpus, file.id, drive), drive) == able()
