"""Connections to Kafka, made from the settings."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiokafka.errors as kafka_errors
from aiokafka.conn import create_conn
from aiokafka.helpers import create_ssl_context
from aiokafka.protocol.metadata import MetadataRequest

from pipeline.core.certificates import refused_ours, untrusted
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.kafka.producer import NotDelivered, Producer, Sign
from pipeline.kafka.reader import Reader, ReadFailed
from pipeline.observability.traced_records import sending
from pipeline.runtime.settings import KafkaSettings, Settings
from topics.registry import Topic


@asynccontextmanager
async def producer(kafka: KafkaSettings) -> AsyncIterator[Producer]:
    """A started producer; at the end of the block it waits for the records in flight. Raises Retryable when Kafka
    cannot be reached, Misconfigured when it refuses us."""
    sign = signature_of(kafka)
    try:
        async with Producer(kafka.bootstrap, kafka.topic_prefix, security(kafka), trace=sending, sign=sign) as started:
            yield started
    except NotDelivered as error:
        raise await refusal(kafka) or Retryable(str(error), service="kafka") from error


def publisher(settings: Settings) -> AbstractAsyncContextManager[Producer]:
    """``producer`` for a process that publishes to the topics of ``registry.INTAKE``. Raises Misconfigured when the
    pipeline would refuse everything that it publishes."""
    if settings.producers == "enforce" and settings.kafka.signing_key_file is None:
        raise Misconfigured(
            "PENSTOCK_PRODUCERS=enforce refuses what is not signed: set PENSTOCK_KAFKA_SIGNING_KEY_FILE to the private"
            " key of an enrolled producer (`penstock producer add`)",
            service="kafka",
        )
    return producer(settings.kafka)


def signature_of(kafka: KafkaSettings) -> Sign | None:
    """The function with which this process signs; None: it does not. Raises Misconfigured when its key cannot be
    read."""
    if kafka.signing_key_file is None:
        return None
    from topics.signatures import NotAKey, Signer  # cryptography takes 50 ms

    try:
        return Signer(Path(kafka.signing_key_file).read_bytes()).headers
    except (OSError, NotAKey) as error:
        why = str(error) if isinstance(error, NotAKey) else "no such file, or not readable"
        raise Misconfigured(f"PENSTOCK_KAFKA_SIGNING_KEY_FILE: {why}", service="kafka") from error


async def deliver(sends: Iterable[Awaitable[asyncio.Future[Any]]], *, within_seconds: float = 60.0) -> int:
    """Send records and wait until Kafka has stored all of them; returns their number. Raises Retryable when that is not
    certain.

    sends: calls of ``Producer.send`` or ``send_raw``, which are awaited one after another to keep their order.
    """
    async with certain(within_seconds):
        futures = [await send for send in sends]
        for future in futures:
            await asyncio.shield(future)
    return len(futures)


@asynccontextmanager
async def certain(within_seconds: float = 60.0) -> AsyncIterator[None]:
    """Raises Retryable when the records that are sent inside the block are not known to be stored at its end."""
    try:
        async with asyncio.timeout(within_seconds):
            yield
    except TimeoutError as error:
        raise Retryable(f"Kafka did not confirm within {within_seconds:.0f} s", service="kafka") from error
    except NotDelivered as error:
        raise Retryable(str(error), service="kafka") from error


@asynccontextmanager
async def reader(kafka: KafkaSettings, topic: Topic) -> AsyncIterator[Reader]:
    """A started reader of single records. Raises Retryable when Kafka cannot be reached."""
    try:
        async with Reader(kafka.bootstrap, topic, kafka.topic_prefix, security(kafka)) as started:
            yield started
    except ReadFailed as error:
        raise await refusal(kafka) or Retryable(str(error), service="kafka") from error


CONNECT_SECONDS = 10.0


def security(kafka: KafkaSettings) -> dict[str, Any]:
    """aiokafka's connection options for TLS and SASL; empty for a plaintext listener. Raises Misconfigured when a
    certificate cannot be read."""
    options: dict[str, Any] = {}
    if kafka.security_protocol != "PLAINTEXT":
        options["security_protocol"] = kafka.security_protocol
    if kafka.security_protocol.endswith("SSL"):
        options["ssl_context"] = _context(kafka)
    if kafka.security_protocol.startswith("SASL"):
        options |= {
            "sasl_mechanism": kafka.sasl_mechanism,
            "sasl_plain_username": kafka.sasl_username,
            "sasl_plain_password": kafka.sasl_password.get_secret_value() if kafka.sasl_password else None,
        }
    return options


def _context(kafka: KafkaSettings) -> ssl.SSLContext:
    password = kafka.ssl_key_password.get_secret_value() if kafka.ssl_key_password else ""  # or OpenSSL asks a terminal
    try:
        context: ssl.SSLContext = create_ssl_context(
            cafile=kafka.ssl_cafile, certfile=kafka.ssl_certfile, keyfile=kafka.ssl_keyfile, password=password
        )
        return context
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        names = "PENSTOCK_KAFKA_SSL_CAFILE, _SSL_CERTFILE, _SSL_KEYFILE or _SSL_KEY_PASSWORD"
        why = "no such file" if isinstance(error, FileNotFoundError) else "not a PEM of that kind, or not readable"
        raise Misconfigured(f"{names}: {why}", service="kafka") from error


async def refusal(kafka: KafkaSettings) -> Misconfigured | None:
    """Connect to one bootstrap server after another and explain why Kafka refuses us, where only other settings help.
    None when one accepts us, or when none can be reached."""
    options = security(kafka)
    for server in kafka.bootstrap.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                connection = await create_conn(host, int(port), client_id="penstock", **options)
        except (kafka_errors.KafkaError, OSError, EOFError, ValueError) as error:
            if why := await _explanation(kafka, host, port, error):
                return Misconfigured(f"Kafka at {server.strip()}: {why}", service="kafka")
            continue
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await connection.send(MetadataRequest([]))  # a listener that wants a login closes only now
        except (kafka_errors.KafkaError, OSError, EOFError) as error:
            if why := await _explanation(kafka, host, port, error):
                return Misconfigured(f"Kafka at {server.strip()}: {why}", service="kafka")
            continue
        finally:
            connection.close()
        return None
    return None


async def _explanation(kafka: KafkaSettings, host: str, port: str, error: BaseException) -> str | None:
    text = " ".join(str(cause) for cause in (error, error.__cause__, error.__context__) if cause)
    with_tls = kafka.security_protocol.endswith("SSL")
    if why := untrusted(text, authority="PENSTOCK_KAFKA_SSL_CAFILE", address="PENSTOCK_KAFKA_BOOTSTRAP"):
        return why
    if why := refused_ours(text, setting="PENSTOCK_KAFKA_SSL_CERTFILE and _SSL_KEYFILE"):
        return why
    match error:
        case ConnectionRefusedError() | TimeoutError():
            return None
        case kafka_errors.UnsupportedSaslMechanismError():
            return f"it does not support {kafka.sasl_mechanism}: change PENSTOCK_KAFKA_SASL_MECHANISM"
        case kafka_errors.AuthenticationFailedError() | kafka_errors.SaslAuthenticationFailed():
            return "it refuses the login: check PENSTOCK_KAFKA_SASL_USERNAME and _SASL_PASSWORD"
        case kafka_errors.IllegalSaslStateError():
            return "it requires a login: set PENSTOCK_KAFKA_SECURITY_PROTOCOL=SASL_SSL (or SASL_PLAINTEXT)"
        case ssl.SSLError():
            return "it does not use TLS on this port: change PENSTOCK_KAFKA_SECURITY_PROTOCOL or the port"
    if not with_tls and await _speaks_tls(host, port):
        return "it requires TLS: set PENSTOCK_KAFKA_SECURITY_PROTOCOL=SASL_SSL (or SSL)"
    if kafka.security_protocol in ("SSL", "PLAINTEXT") and isinstance(error, kafka_errors.KafkaConnectionError):
        login = "SASL_SSL" if with_tls else "SASL_PLAINTEXT"
        return f"it closes the connection: if it requires a login, set PENSTOCK_KAFKA_SECURITY_PROTOCOL={login}"
    return None


async def _speaks_tls(host: str, port: str) -> bool:
    """Whether a TLS handshake succeeds. The certificate is not checked, because nothing is sent."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
