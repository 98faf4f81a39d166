"""The wire contract as an AsyncAPI 3.0 document: ``python -m topics.asyncapi > docs/asyncapi.json``."""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from topics.codec import CE_TYPE_PREFIX, CONTENT_TYPE
from topics.messages import MESSAGES, AnyMessage, ConflictChanged, ConversationMessage, DocumentMessage
from topics.registry import (
    ANSWERS_INVALIDATED,
    CONFLICTS,
    CONVERSATIONS,
    DEAD_LETTERS,
    DOCUMENTS_BACKFILL,
    DOCUMENTS_INDEXED,
    DOCUMENTS_LIVE,
    IDENTITIES,
    INDEX_BACKFILL,
    INDEX_LIVE,
    TOPICS,
    Topic,
)

KAFKA_BINDING = "0.5.0"
RECEIVES = (DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, IDENTITIES, CONVERSATIONS, INDEX_LIVE, INDEX_BACKFILL)
SENDS = (INDEX_LIVE, INDEX_BACKFILL, DOCUMENTS_INDEXED, CONFLICTS, ANSWERS_INVALIDATED, DEAD_LETTERS)
"""The topics that Penstock itself receives from and sends to. Connectors send to the first ones that it receives from;
other teams read the announcements and dead letters."""


class _PlainSchema(GenerateJsonSchema):
    """Omits the title of every field, which would only repeat its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def payload_schema(cls: type[AnyMessage]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a message's value. Unknown fields are permitted, because they are ignored."""
    schema = cls.model_json_schema(schema_generator=_PlainSchema)
    schema = dict(_plain(schema, schema.pop("$defs", {})))
    schema["description"] = _one_line(cls.__doc__ or "")
    return schema


def _plain(node: Any, parts: dict[str, Any]) -> Any:
    """Replace references, which would lead nowhere in the document that includes the schema, and make each description
    one line."""
    if isinstance(node, list):
        return [_plain(item, parts) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _plain(parts[node["$ref"].removeprefix("#/$defs/")], parts)
    return {
        name: _one_line(value) if name == "description" and isinstance(value, str) else _plain(value, parts)
        for name, value in node.items()
    }


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "").split())


def _headers(kind: str) -> dict[str, Any]:
    """Return the schema of the Kafka headers: CloudEvents in binary content mode, and W3C trace context, in UTF-8."""
    text = {"type": "string", "minLength": 1}
    return {
        "type": "object",
        "required": ["ce_specversion", "ce_id", "ce_type", "ce_source", "ce_time", "content-type"],
        "properties": {
            "ce_specversion": {"const": "1.0"},
            "ce_id": text | {"description": "Equal for equal messages; deduplicate by ce_source and ce_id."},
            "ce_type": {"const": f"{CE_TYPE_PREFIX}{kind}", "description": "Decides how the value is read."},
            "ce_source": text | {"description": "/tenant/source, percent-encoded."},
            "ce_time": text | {"format": "date-time", "description": "The message's observed_at."},
            "content-type": {"const": CONTENT_TYPE},
            "traceparent": text | {"description": "W3C trace context; optional."},
            "penstock-signature": text
            | {
                "description": "v1:KEY_ID:SIGNATURE, Ed25519 in Base64; on the topics that producers write. Optional,"
                " and without it a record is refused where signatures are enforced: docs/wire.md."
            },
        },
    }


def _message(kind: str, cls: type[AnyMessage]) -> dict[str, Any]:
    key = "tenant/source/external_id" if issubclass(cls, DocumentMessage) else "tenant/source/principal"
    if issubclass(cls, ConversationMessage):
        key = "tenant/member"
    if issubclass(cls, ConflictChanged):
        key = "tenant/conflict_id"
    return {
        "name": f"{CE_TYPE_PREFIX}{kind}",
        "title": cls.__name__,
        "summary": _one_line((cls.__doc__ or "").split("\n\n")[0]),
        "contentType": CONTENT_TYPE,
        "headers": _headers(kind),
        "payload": {"$ref": f"#/components/schemas/{cls.__name__}"},
        "bindings": {
            "kafka": {
                "key": {"type": "string", "description": f"{key}, in UTF-8"},
                "bindingVersion": KAFKA_BINDING,
            }
        },
    }


def _channel(topic: Topic) -> dict[str, Any]:
    configuration: dict[str, Any] = {"cleanup.policy": [topic.cleanup], "max.message.bytes": topic.max_message_bytes}
    if topic.cleanup == "delete":
        configuration["retention.ms"] = topic.retention_ms
    return {
        "address": topic.name,
        "title": topic.name,
        "description": topic.purpose[0].upper() + topic.purpose[1:] + ".",
        "messages": {kind: {"$ref": f"#/components/messages/{kind}"} for kind in topic.holds},
        "bindings": {
            "kafka": {
                "topic": topic.name,
                "partitions": topic.partitions,
                "topicConfiguration": configuration,
                "bindingVersion": KAFKA_BINDING,
            }
        },
    }


def _operation(action: str, topic: Topic) -> dict[str, Any]:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{topic.name}"},
        "messages": [{"$ref": f"#/channels/{topic.name}/messages/{kind}"} for kind in topic.holds],
    }


def document() -> dict[str, Any]:
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Penstock",
            "version": "1.0.0",
            "description": "Document changes in, index changes out. Generated from the code by `python -m"
            " topics.asyncapi`; docs/wire.md explains the rules that a schema cannot say.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "channels": {topic.name: _channel(topic) for topic in TOPICS},
        "operations": {
            **{f"receive.{topic.name}": _operation("receive", topic) for topic in RECEIVES},
            **{f"send.{topic.name}": _operation("send", topic) for topic in SENDS},
        },
        "components": {
            "messages": {kind: _message(kind, cls) for kind, cls in MESSAGES.items()},
            "schemas": {cls.__name__: payload_schema(cls) for cls in MESSAGES.values()},
        },
    }


def text() -> str:
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
