"""A playground's responses from a dictionary."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.conform.responses import Responses
from connectors.conform.samples import Sample, Samples, over_http


def samples(*ids: str) -> Samples:
    made = Samples({}, {}, lambda _: None)
    made.documents = {id: Sample(id, id.title(), f"Text of {id}", acl_tags=["staff", "board"]) for id in ids}
    made.members = {"staff": ["ann"], "board": []}
    return made


def answer(responses: dict[str, Any], path: str, query: dict[str, str] | None = None, ids: str = "abcd") -> Any:
    return Responses(responses).answer(samples(*ids), path, query or {})


def test_a_document_keeps_the_types_and_the_nesting_of_its_response() -> None:
    page = {"data": {"id": "{external_id}", "url": "https://wiki/{external_id}", "tags": "{acl_tags}", "old": False}}
    assert answer({"/pages/{external_id}": page}, "/pages/b") == {
        "data": {"id": "b", "url": "https://wiki/b", "tags": ["staff", "board"], "old": False}
    }
    assert answer({"/pages/{external_id}": page}, "/pages/z") is None
    assert answer({"/pages/{external_id}": page}, "/pages/b/text") is None


def test_a_listing_continues_after_the_place_that_its_response_names() -> None:
    listing = {"pages": [{"id": "{external_id}"}], "next": "{next}", "link": "/pages?from={next}", "kinds": ["page"]}
    routes = {"/pages?from={next}&kind=page": listing}
    first = answer(routes, "/pages", {"kind": "page"})
    assert first == {
        "pages": [{"id": "a"}, {"id": "b"}, {"id": "c"}],
        "next": "c",
        "link": "/pages?from=c",
        "kinds": ["page"],
    }
    last = answer(routes, "/pages", {"kind": "page", "from": "c"})
    assert last == {"pages": [{"id": "d"}], "next": None, "link": None, "kinds": ["page"]}
    assert answer(routes, "/pages", {"kind": "blog"}) is None
    assert answer({"/pages": ["{title}"]}, "/pages") == ["A", "B", "C", "D"]


def test_groups_are_an_object_or_a_list_or_each_has_a_path() -> None:
    assert answer({"/groups": "{members}"}, "/groups") == {"staff": ["ann"], "board": []}
    group = {"name": "{tag}", "people": "{members}"}
    groups = [{"name": "staff", "people": ["ann"]}, {"name": "board", "people": []}]
    assert answer({"/groups": {"groups": [group]}}, "/groups") == {"groups": groups}
    assert answer({"/groups/{tag}": group}, "/groups/staff") == groups[0]
    assert answer({"/groups/{tag}": group}, "/groups/nobody") is None


def test_a_name_that_no_document_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no document or group has \{titel\}: write one of acl_tag, "):
        Responses({"/pages": [{"title": "{titel}"}]})


def test_a_service_may_have_one_group_as_text() -> None:
    ticket = {"team": "{acl_tag}", "path": "/teams/{acl_tag}"}
    assert answer({"/tickets/{external_id}": ticket}, "/tickets/b") == {"team": "staff", "path": "/teams/staff"}


@pytest.mark.parametrize("text", ["team:{acl_tags}", "{members}, and nobody else", "{title} {required_tags}"])
def test_an_array_within_a_text_is_refused(text: str) -> None:
    """It became the text "team:['staff']", a tag that nobody holds."""
    with pytest.raises(ValueError, match="is no text: write it alone"):
        Responses({"/pages": [{"tags": text}]})


async def test_documents_are_restricted_by_their_readers_where_the_responses_have_no_required_tags() -> None:
    for body, tags in (("{acl_tags}", ["board"]), (["{acl_tags}", "{required_tags}"], ["staff"])):
        async with over_http({"/pages/{external_id}": {"tags": body}}) as playground:
            await playground.write("plan", "text")
            await playground.restrict("plan")
            assert playground.documents["plan"].acl_tags == tags
