"""Reference of Kafka's topics and messages, from the contract that ``docs/asyncapi.json`` publishes."""

from __future__ import annotations

from docs.site.markdown import code, prose, table
from docs.site.schemas import fields
from topics.asyncapi import payload_schema
from topics.messages import MESSAGES
from topics.registry import DAY_MS, TOPICS


def document() -> str:
    topics = [
        (
            code(topic.name),
            topic.purpose,
            ", ".join(f"[{name}](#{_anchor(name)})" for name in topic.holds) or "copies of unreadable records",
            str(topic.partitions),
            "compacted by key" if topic.cleanup == "compact" else f"{topic.retention_ms // DAY_MS} days",
            f"{topic.max_message_bytes / 2**20:,.4g} MiB",
        )
        for topic in TOPICS
    ]
    parts = [
        "## Topics\n\n",
        table(("topic", "it carries", "messages", "partitions", "retention", "largest record"), topics),
        "## Messages\n\n",
    ]
    for name, kind in MESSAGES.items():
        schema = payload_schema(kind)
        parts += [f"### {name}\n\n", f"{prose(schema['description'])}\n\n", fields(schema)]
    return "".join(parts)


def _anchor(heading: str) -> str:
    return heading.replace(".", "")
