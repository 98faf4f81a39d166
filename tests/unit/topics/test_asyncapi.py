"""The published description of the wire is what the code does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.topics.test_golden import EXPECTED, golden
from topics import asyncapi
from topics.codec import CE_TYPE_PREFIX, decode, encode
from topics.messages import MESSAGES
from topics.registry import TOPICS

PUBLISHED = Path(__file__).parents[3] / "docs" / "asyncapi.json"


@pytest.fixture(scope="module")
def jsonschema() -> Any:
    """The package: it takes a second to import, which not every process that collects this file should pay."""
    import jsonschema

    return jsonschema


def payload_validator(kind: str, jsonschema: Any) -> Any:
    draft = jsonschema.Draft202012Validator
    return draft(asyncapi.payload_schema(MESSAGES[kind]), format_checker=draft.FORMAT_CHECKER)


def test_the_published_asyncapi_document_is_up_to_date() -> None:
    assert PUBLISHED.read_text() == asyncapi.text(), "stale: python -m topics.asyncapi > docs/asyncapi.json"


def resolve(document: dict[str, Any], ref: str) -> Any:
    node: Any = document
    for part in ref.removeprefix("#/").split("/"):
        node = node[part]
    return node


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in references(value)]
    return [ref for value in node for ref in references(value)] if isinstance(node, list) else []


def test_every_reference_in_the_asyncapi_document_resolves() -> None:
    document = asyncapi.document()
    results = references(document)
    assert len(results) > len(TOPICS)
    for ref in results:
        assert resolve(document, ref)


def test_the_document_has_the_shape_of_asyncapi_3() -> None:
    document = asyncapi.document()
    assert document["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= set(document["info"])
    assert {channel["address"] for channel in document["channels"].values()} == {topic.name for topic in TOPICS}
    for operation in document["operations"].values():
        assert operation["action"] in ("send", "receive")
        channel = resolve(document, operation["channel"]["$ref"])
        assert {message["$ref"].split("/")[-1] for message in operation["messages"]} == set(channel["messages"])
    used = {operation["channel"]["$ref"] for operation in document["operations"].values()}
    assert used == {f"#/channels/{topic.name}" for topic in TOPICS}
    assert set(document["components"]["messages"]) == set(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES)
def test_payload_schemas_are_valid_in_both_drafts_that_tools_use(kind: str, jsonschema: Any) -> None:
    schema = asyncapi.payload_schema(MESSAGES[kind])
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft7Validator.check_schema(schema)
    assert "$ref" not in json.dumps(schema)
    assert "\n" not in schema["description"]


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_records_match_their_schema(name: str, jsonschema: Any) -> None:
    record = golden(name)
    kind = record["headers"]["ce_type"].removeprefix(CE_TYPE_PREFIX)
    payload_validator(kind, jsonschema).validate(record["value"])
    if not name.endswith(".minimal"):  # ours and good citizens'; the minimal one has only what reading needs
        headers = asyncapi.document()["components"]["messages"][kind]["headers"]
        jsonschema.Draft202012Validator(headers).validate(record["headers"])


def test_the_example_in_the_wire_guide_is_a_valid_record() -> None:
    """docs/wire.md shows one record: what its reader copies must be readable."""
    guide = (PUBLISHED.parent / "wire.md").read_text()
    example = next(block for block in guide.split("```") if "ce_type:" in block)
    described, value = example.split("value", 1)
    headers = [tuple(line.strip().split(": ")) for line in described.split("headers")[1].strip().splitlines()]
    message = decode(value.strip().encode(), [(name, text.encode()) for name, text in headers])
    assert f"key      {message.key}\n" in described
    assert {name for name, _ in headers} == {name for name, _ in encode(message).headers}
    assert all(f"`{kind}`" in guide for kind in MESSAGES if not kind.startswith("index."))
    assert all(f"`{topic.name}`" in guide for topic in TOPICS)


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_json_schema_rejects_what_the_code_rejects(kind: str, jsonschema: Any) -> None:
    value = golden(kind)["value"]
    wrong: list[dict[str, Any]] = [
        {**value, "tenant": "a/b"},
        {**value, "source": ""},
        {**value, "observed_at": 5},
        *({k: v for k, v in value.items() if k != name} for name in ("tenant", "source", "observed_at")),
    ]
    if "version" in value and kind != "document.indexed.v1":
        wrong += [{**value, "version": -1}, {**value, "version": "1.5"}, {**value, "version": 2**63}]
    if "acl_tags" in value:
        wrong += [{**value, "acl_tags": None}, {**value, "acl_tags": [""]}, {**value, "acl_tags": ["a"] * 1_001}]
    if "metadata" in value:
        wrong += [{**value, "metadata": {"a": {}}}, {**value, "metadata": {"a": [[1]]}}]
    for problem in wrong:
        with pytest.raises(jsonschema.ValidationError):
            payload_validator(kind, jsonschema).validate(problem)
