"""Runs in the query service's container, by ``docker compose exec``: what its logins and its network let it do.

Prints a JSON list of the expectations that were not met.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import ssl
import struct
import sys
import urllib.error
import urllib.request

import psycopg
from aiokafka import AIOKafkaProducer
from aiokafka.errors import TopicAuthorizationFailedError

DSN = os.environ["PENSTOCK_POSTGRES_DSN"]
METADATA_REQUEST = struct.pack(">hhih5si", 3, 1, 1, 5, b"probe", 0)
"""Kafka's metadata request without topics, which a listener without TLS would answer."""


def postgres() -> list[str]:
    wrong = []
    try:
        psycopg.connect(DSN.replace("sslmode=verify-full", "sslmode=disable"), connect_timeout=5).close()
        wrong.append("Postgres accepts a connection without TLS")
    except psycopg.OperationalError:
        pass
    with psycopg.connect(DSN, connect_timeout=5) as connection:
        row = connection.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
        if row is None or row[0] is not True:
            wrong.append("the connection to Postgres is not encrypted")
        try:
            connection.execute("DELETE FROM documents")
            wrong.append("the query service may delete documents in Postgres")
        except psycopg.errors.InsufficientPrivilege:
            connection.rollback()
    return wrong


def elasticsearch() -> list[str]:
    wrong = []
    address = os.environ["PENSTOCK_ELASTICSEARCH_URL"]
    user = f"{os.environ['PENSTOCK_ELASTICSEARCH_USERNAME']}:{os.environ['PENSTOCK_ELASTICSEARCH_PASSWORD']}"
    context = ssl.create_default_context(cafile=os.environ["PENSTOCK_ELASTICSEARCH_CA_CERTS"])

    def status(path: str, method: str, login: str | None, base: str = address) -> int:
        headers = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if login else {}
        request = urllib.request.Request(f"{base}{path}", method=method, headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as response:  # noqa: S310
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    try:
        status("/", "GET", None, address.replace("https:", "http:"))
        wrong.append("Elasticsearch answers without TLS")
    except (OSError, urllib.error.URLError):
        pass
    if status("/_security/_authenticate", "GET", None) != 401:
        wrong.append("Elasticsearch answers without a login")
    if (code := status("/_security/_authenticate", "GET", user)) != 200:
        wrong.append(f"Elasticsearch refuses the query service's user ({code})")
    if (code := status("/chunks-probe", "PUT", user)) != 403:
        wrong.append(f"the query service may create an index in Elasticsearch ({code})")
    return wrong


async def kafka() -> list[str]:
    wrong = []
    host, _, port = os.environ["PENSTOCK_KAFKA_BOOTSTRAP"].partition(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        plain.sendall(struct.pack(">i", len(METADATA_REQUEST)) + METADATA_REQUEST)
        try:
            answer = plain.recv(64)
        except ConnectionResetError:
            answer = b""
        if answer[4:8] == struct.pack(">i", 1):
            wrong.append("Kafka answers without TLS")
    producer = AIOKafkaProducer(
        bootstrap_servers=os.environ["PENSTOCK_KAFKA_BOOTSTRAP"],
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_plain_username=os.environ["PENSTOCK_KAFKA_SASL_USERNAME"],
        sasl_plain_password=os.environ["PENSTOCK_KAFKA_SASL_PASSWORD"],
        ssl_context=ssl.create_default_context(cafile=os.environ["PENSTOCK_KAFKA_SSL_CAFILE"]),
    )
    await producer.start()
    try:
        await producer.send_and_wait("documents.live.v1", b"probe", partition=0)
        wrong.append("the query service may publish documents in Kafka")
    except TopicAuthorizationFailedError:
        pass
    finally:
        await producer.stop()
    return wrong


if __name__ == "__main__":
    sys.stdout.write(json.dumps([*postgres(), *elasticsearch(), *asyncio.run(kafka())]) + "\n")
