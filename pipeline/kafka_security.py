"""How Kafka is spoken to (TLS, SASL), and why it does not let us in."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import aiokafka.errors as kafka_errors
from aiokafka.conn import create_conn
from aiokafka.helpers import create_ssl_context
from aiokafka.protocol.metadata import MetadataRequest

from pipeline.core.certificates import refused_ours, untrusted
from pipeline.core.errors import Misconfigured
from pipeline.settings import KafkaSettings

ASK_SECONDS = 10.0


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
    """Why Kafka does not let us in, where only other settings help: asked of one server after another. None when it
    does, or when none can be reached."""
    options = security(kafka)
    for server in kafka.bootstrap.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            async with asyncio.timeout(ASK_SECONDS):
                connection = await create_conn(host, int(port), client_id="penstock", **options)
        except (kafka_errors.KafkaError, OSError, EOFError, ValueError) as error:
            if why := await _explained(kafka, host, port, error):
                return Misconfigured(f"Kafka at {server.strip()}: {why}", service="kafka")
            continue
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await connection.send(MetadataRequest([]))  # a listener that wants a login closes only now
        except (kafka_errors.KafkaError, OSError, EOFError) as error:
            if why := await _explained(kafka, host, port, error):
                return Misconfigured(f"Kafka at {server.strip()}: {why}", service="kafka")
            continue
        finally:
            connection.close()
        return None
    return None


async def _explained(kafka: KafkaSettings, host: str, port: str, error: BaseException) -> str | None:
    text = " ".join(str(one) for one in (error, error.__cause__, error.__context__) if one)
    with_tls = kafka.security_protocol.endswith("SSL")
    if why := untrusted(text, authority="PENSTOCK_KAFKA_SSL_CAFILE", address="PENSTOCK_KAFKA_BOOTSTRAP"):
        return why
    if why := refused_ours(text, setting="PENSTOCK_KAFKA_SSL_CERTFILE and _SSL_KEYFILE"):
        return why
    match error:
        case ConnectionRefusedError() | TimeoutError():
            return None
        case kafka_errors.UnsupportedSaslMechanismError():
            return f"it does not take {kafka.sasl_mechanism}: PENSTOCK_KAFKA_SASL_MECHANISM"
        case kafka_errors.AuthenticationFailedError() | kafka_errors.SaslAuthenticationFailed():
            return "it refuses the login: PENSTOCK_KAFKA_SASL_USERNAME and _SASL_PASSWORD"
        case kafka_errors.IllegalSaslStateError():
            return "it wants a login: PENSTOCK_KAFKA_SECURITY_PROTOCOL=SASL_SSL (or SASL_PLAINTEXT)"
        case ssl.SSLError():
            return "it does not speak TLS there: PENSTOCK_KAFKA_SECURITY_PROTOCOL, or another port"
    if not with_tls and await _speaks_tls(host, port):
        return "it wants TLS: PENSTOCK_KAFKA_SECURITY_PROTOCOL=SASL_SSL (or SSL)"
    if kafka.security_protocol in ("SSL", "PLAINTEXT") and isinstance(error, kafka_errors.KafkaConnectionError):
        login = "SASL_SSL" if with_tls else "SASL_PLAINTEXT"
        return f"it hangs up on us: if it wants a login, PENSTOCK_KAFKA_SECURITY_PROTOCOL={login}"
    return None


async def _speaks_tls(host: str, port: str) -> bool:
    """Whoever it is: nothing is sent there."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(ASK_SECONDS):
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
