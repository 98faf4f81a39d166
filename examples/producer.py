"""An external producer: it sends one signed document to Penstock, without Penstock installed.

    pip install aiokafka cryptography
    openssl genpkey -algorithm ed25519 -out wiki-key.pem          # stays here
    openssl pkey -in wiki-key.pem -pubout -out wiki.pub           # goes to Penstock's operator, who runs:
    penstock producer add wiki --allow acme/wiki --public-key wiki.pub

    BOOTSTRAP=127.0.0.1:9092 KEY_FILE=wiki-key.pem TENANT=acme SOURCE=wiki python producer.py leave.md "Thirty days."

For a cluster with TLS and a login, pass ``security_protocol`` and its related options to AIOKafkaProducer.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from aiokafka import AIOKafkaProducer
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

TOPIC = "documents.live.v1"


def signature(private: Ed25519PrivateKey, topic: str, ce_type: str, key: bytes, value: bytes) -> bytes:
    """The header ``penstock-signature``. topic: its full name, with the prefix of a shared cluster."""
    public = private.public_key().public_bytes_raw()
    key_id = hashlib.sha256(public).hexdigest()[:32]
    lines = [
        "penstock-signature-v1",
        topic,
        ce_type,
        hashlib.sha256(key).hexdigest(),
        hashlib.sha256(value).hexdigest(),
    ]
    signed = private.sign("\n".join(lines).encode())
    return f"v1:{key_id}:{base64.b64encode(signed).decode()}".encode()


async def publish(external_id: str, content: str) -> None:
    tenant, source = os.environ["TENANT"], os.environ["SOURCE"]
    topic = os.environ.get("TOPIC_PREFIX", "") + TOPIC
    private = serialization.load_pem_private_key(Path(os.environ["KEY_FILE"]).read_bytes(), password=None)
    assert isinstance(private, Ed25519PrivateKey)

    observed_at = datetime.now(UTC)  # before the source is read
    ce_type = "io.penstock.document.upserted.v1"
    key = f"{tenant}/{source}/{external_id}".encode()
    value = json.dumps(
        {
            "tenant": tenant,
            "source": source,
            "external_id": external_id,
            "observed_at": observed_at.isoformat(),
            "version": time.time_ns(),
            "title": external_id,
            "content": content,
            "media_type": "text/markdown",
            "acl_tags": ["staff"],
        }
    ).encode()
    headers = [
        ("ce_specversion", b"1.0"),
        ("ce_id", hashlib.sha256(value).hexdigest().encode()),
        ("ce_type", ce_type.encode()),
        ("ce_source", f"/{quote(tenant)}/{quote(source)}".encode()),
        ("ce_time", observed_at.isoformat().encode()),
        ("content-type", b"application/json"),
        ("penstock-signature", signature(private, topic, ce_type, key, value)),
    ]
    async with AIOKafkaProducer(
        bootstrap_servers=os.environ["BOOTSTRAP"], acks="all", enable_idempotence=False
    ) as producer:
        await producer.send_and_wait(topic, value, key=key, headers=headers)


if __name__ == "__main__":
    asyncio.run(publish(sys.argv[1], sys.argv[2]))
