"""A connector in another language: a plain Kafka client and the documented bytes, nothing of ours on its side."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from tests.support.space import PROJECT, Space, now

pytestmark = pytest.mark.stack

GUIDE = PROJECT / "docs" / "connectors" / "your-own.md"


def documented() -> list[dict[str, object]]:
    """The values as the guide prints them: a document, and a membership."""
    return [json.loads(match) for match in re.findall(r'`(\{"tenant".*?\})`', GUIDE.read_text())]


def headers(kind: str, identity: str) -> list[tuple[str, bytes]]:
    given = {
        "ce_specversion": "1.0",
        "ce_type": f"io.penstock.{kind}",
        "ce_id": identity,
        "ce_source": "/acme/tickets",
        "ce_time": now().isoformat(),
        "content-type": "application/json",
    }
    return [(name, value.encode()) for name, value in given.items()]


async def test_records_published_as_documented_are_searchable_by_permitted_readers(space: Space) -> None:
    space.start("detect", "vectors", "keywords")
    document, membership = documented()
    kafka = AIOKafkaProducer(bootstrap_servers=space.settings.kafka.bootstrap, acks="all")
    await kafka.start()
    try:
        prefix = space.settings.kafka.topic_prefix
        for topic, key, kind, value in (
            ("documents.live.v1", "acme/tickets/4711", "document.upserted.v1", document),
            ("identities.v1", "acme/tickets/ann@acme.example", "identity.changed.v1", membership),
        ):
            body = json.dumps(value).encode()
            await kafka.send_and_wait(f"{prefix}{topic}", body, key=key.encode(), headers=headers(kind, f"{kind}-1"))
    finally:
        await kafka.stop()

    async def search_ids(principal: str) -> list[str]:
        _, result = await space.penstock("search", "fire", "--tenant", "acme", "--as", principal, "--json")
        return [item["external_id"] for item in result["results"]]

    deadline = time.monotonic() + 90
    while not await search_ids("ann@acme.example"):
        assert time.monotonic() < deadline, "what was documented did not become searchable"
    assert await search_ids("ann@acme.example") == ["4711"]
    assert await search_ids("eve@acme.example") == []


def test_the_documented_records_match_the_published_schema() -> None:
    published = json.loads((PROJECT / "docs" / "asyncapi.json").read_text())
    schemas = json.dumps(published["components"])
    for value, name in zip(documented(), ("document.upserted.v1", "identity.changed.v1"), strict=True):
        assert name in schemas
        message = next(
            message
            for key, message in published["components"]["messages"].items()
            if name in json.dumps([key, message])
        )
        payload = message["payload"]
        payload = payload.get("schema", payload)
        if "$ref" in payload:
            target: object = published
            for part in payload["$ref"].removeprefix("#/").split("/"):
                target = target[part]  # type: ignore[index]
            payload = target
        import jsonschema  # here, because it takes a second

        jsonschema.validate(value, {**payload, "components": published["components"]})


@pytest.mark.parametrize(("path", "lines"), [("penstock/template/source.py", 30), ("examples/notes.py", 60)])
def test_the_guide_contains_its_examples_verbatim(path: str, lines: int) -> None:
    example = (PROJECT / path).read_text()
    assert f"```python\n{example}```" in GUIDE.read_text()
    assert len([line for line in example.splitlines() if line.strip()]) <= lines


def test_the_guide_names_every_law() -> None:
    from connectors.conform.run import ALL_LAWS

    names = set(re.findall(r"`([a-z-]+)`", GUIDE.read_text().partition("## Prove it")[2]))
    assert set(ALL_LAWS) <= names


def test_every_guide_linked_in_the_overview_exists() -> None:
    overview = GUIDE.with_name("README.md")
    missing = [
        name
        for name in re.findall(r"\]\(([a-z-]+\.md)\)", overview.read_text())
        if not Path(GUIDE.parent, name).exists()
    ]
    assert missing == []
