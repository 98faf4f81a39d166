"""Knocking at the secured servers, rightly and wrongly, and looking at what a login may do there."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from aiokafka import AIOKafkaConsumer
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from deploy.local import dist
from deploy.local.secured import compose_kafka
from deploy.local.service import Place
from pipeline.core.errors import PenstockError
from pipeline.kafka.client import producer, security, signature_of
from pipeline.kafka.producer import Producer
from pipeline.kafka.stopping import stop_consumer
from pipeline.runtime.settings import ElasticsearchSettings, KafkaSettings, PostgresSettings
from pipeline.stores.elasticsearch import connect, translated
from pipeline.stores.postgres import open_pool
from tests.support.deploy.secured_kit import Site


def kafka_settings(site: Site, login: str, **more: Any) -> KafkaSettings:
    endpoint = site.secured.stack.endpoints()["kafka"]
    given = {
        "bootstrap": endpoint["bootstrap"],
        "security_protocol": "SASL_SSL",
        "sasl_username": login,
        "sasl_password": site.secured.logins[login].password,
        "ssl_cafile": str(site.secured.authority.ca),
    }
    return KafkaSettings(**{**given, **more})


async def knock_at_kafka(site: Site, **more: Any) -> None:
    async with producer(kafka_settings(site, "penstock_detect", **more)):
        pass


async def let_in_by_kafka(site: Site, **more: Any) -> None:
    """As soon as the broker has read what its controller has been told of the user. Raises PenstockError if never."""
    deadline = asyncio.get_running_loop().time() + 30
    while True:
        try:
            return await knock_at_kafka(site, **more)
        except PenstockError:
            if asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(0.1)


def kafkas_health(site: Site, folder: Path) -> subprocess.CompletedProcess[str]:
    """The health check of docker-compose.yml: what ``kafka-broker-api-versions.sh`` runs, with the same properties."""
    given = compose_kafka("admin.properties", Place(site.secured.home, "kafka"))
    properties = folder / "admin.properties"
    properties.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
    command = [
        str(dist.java()),
        "-cp",
        dist.kafka_classpath(),
        "org.apache.kafka.tools.BrokerApiVersionsCommand",
        f"--bootstrap-server={site.secured.stack.endpoints()['kafka']['bootstrap']}",
        f"--command-config={properties}",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


async def knock_at_postgres(site: Site, *, login: str = "penstock_detect", **more: Any) -> None:
    shown = site.secured.logins[login].certificate
    dsn = conninfo_to_dict(site.secured.stack.endpoints()["postgres"]["dsn"])
    dsn |= {"user": login, "password": site.secured.logins[login].password} | more
    if more.get("sslmode") != "disable":
        dsn = {"sslcert": str(shown.certificate), "sslkey": str(shown.key)} | dsn
    async with open_pool(PostgresSettings(dsn=make_conninfo("", **dsn))):  # type: ignore[arg-type]
        pass


async def knock_at_elasticsearch(site: Site, **more: Any) -> None:
    login = "penstock_keywords"
    shown = site.secured.logins[login].certificate
    given = {
        "url": site.secured.stack.endpoints()["elasticsearch"]["url"],
        "ca_certs": str(site.secured.authority.ca),
        "username": login,
        "password": site.secured.logins[login].password,
        "client_cert": str(shown.certificate),
        "client_key": str(shown.key),
    }
    es = connect(ElasticsearchSettings(**{**given, **more}))
    try:
        with translated("count"):
            await es.count(index="chunks-*")
    finally:
        await es.close()


@asynccontextmanager
async def showing(certificate: Path, key: Path) -> AsyncIterator[int]:
    """Somebody who shows that certificate, on a port of his own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["postgresql", "http/1.1"])

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


def certified_port(site: Site) -> int:
    ports: dict[str, int] = json.loads((site.secured.home / "run" / "ports.json").read_text())
    return ports["kafka-certified"]


def elasticsearch(site: Site, login: str) -> httpx.Client:
    return httpx.Client(
        base_url=site.secured.stack.endpoints()["elasticsearch"]["url"],
        verify=site.secured.context(login),
        auth=(login, site.secured.logins[login].password),
        timeout=30,
    )


@asynccontextmanager
async def producer_of(site: Site, login: str, key: Path | None = None) -> AsyncIterator[Any]:
    """Our own, whose errors are not translated. key: with which it signs."""
    settings = kafka_settings(site, login)
    sign = signature_of(settings.model_copy(update={"signing_key_file": key and str(key)}))
    async with Producer(settings.bootstrap, "", security(settings), sign=sign) as kafka:
        yield kafka


@asynccontextmanager
async def consumer(site: Site, login: str, group: str | None) -> AsyncIterator[Any]:
    settings = kafka_settings(site, login)
    kafka = AIOKafkaConsumer(bootstrap_servers=settings.bootstrap, group_id=group, **security(settings))
    await kafka.start()
    try:
        yield kafka
    finally:
        await stop_consumer(kafka)
