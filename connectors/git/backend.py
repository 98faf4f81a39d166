"""A git server to try against: git's own ``http-backend`` behind https, with a token and faults."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Backend:
    """Serves the bare repositories below a folder (an ASGI application). ``throttled`` and ``failing``: so many of the
    next requests answer 429 or 500. ``redirect``: whereto all are sent. ``asked``: (path, headers) of each request."""

    def __init__(self, root: Path, authorization: str | None = None) -> None:
        """authorization: what the header of that name must be."""
        self.root = root
        self.authorization = authorization
        self.throttled = 0
        self.failing = 0
        self.redirect: str | None = None
        self.asked: list[tuple[str, Mapping[str, str]]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        request = Request(scope, receive)
        self.asked.append((request.url.path, dict(request.headers)))
        await (await self._answer(request))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if self.throttled:
            self.throttled -= 1
            return Response(status_code=429, headers={"retry-after": "1"})
        if self.failing:
            self.failing -= 1
            return Response(status_code=500)
        if self.redirect is not None:
            return Response(status_code=302, headers={"location": self.redirect + request.url.path})
        if self.authorization is not None and request.headers.get("authorization") != self.authorization:
            return Response(status_code=401, headers={"www-authenticate": "Basic"})
        body, url = await request.body(), request.url
        ran = await asyncio.to_thread(self._run, request.method, url.path, url.query, request.headers, body)
        head, _, content = ran.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode("ascii").split("\r\n"))
        status = int(fields.pop("Status", "200").split()[0])
        return Response(content, status_code=status, headers=fields)

    def _run(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """As a web server calls a CGI program (RFC 3875); git-http-backend(1) names the variables."""
        environment = {
            "PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_PROJECT_ROOT": str(self.root), "GIT_HTTP_EXPORT_ALL": "1", "REQUEST_METHOD": method,
            "PATH_INFO": path, "QUERY_STRING": query, "CONTENT_TYPE": headers.get("content-type", ""),
            "CONTENT_LENGTH": str(len(body)), "HTTP_CONTENT_ENCODING": headers.get("content-encoding", ""),
            "GIT_PROTOCOL": headers.get("git-protocol", ""),
        }  # fmt: skip
        done = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, check=True)
        return done.stdout


def certificate(folder: Path, host: str = "") -> tuple[Path, Path]:
    """Files of a certificate for a host name, or for 127.0.0.1, that signs itself, and of its key; for a day."""
    names = [x509.DNSName(host)] if host else [x509.IPAddress(ip_address("127.0.0.1"))]
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "penstock playground")])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    made, secret = folder / "certificate.pem", folder / "key.pem"
    made.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return made, secret
