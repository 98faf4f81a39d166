"""The playground of git for the contract suite: a real repository that git's own ``http-backend`` serves over https,
with a token and faults."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from connectors.fakes.misbehaviour import Misbehaving
from connectors.git.options import basic
from connectors.source import Request
from pipeline.runtime.http_server import served


class Backend:
    """Serves the bare repositories below a folder (an ASGI application). ``throttled`` and ``failing``: how many of the
    next requests get 429 or 500. ``redirect``: the target of all requests. ``requests``: each one's path and
    headers."""

    def __init__(self, root: Path, authorization: str | None = None) -> None:
        """authorization: the value that the header of that name must have."""
        self.root = root
        self.authorization = authorization
        self.throttled = 0
        self.failing = 0
        self.redirect: str | None = None
        self.requests: list[tuple[str, Mapping[str, str]]] = []
        self._app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _answer(self, request: HttpRequest) -> Response:
        self.requests.append((request.url.path, dict(request.headers)))
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
        output = await asyncio.to_thread(self._run, request.method, url.path, url.query, request.headers, body)
        head, _, content = output.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode("ascii").split("\r\n"))
        status = int(fields.pop("Status", "200").split()[0])
        return Response(content, status_code=status, headers=fields)

    def _run(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """Run git as a CGI program (RFC 3875); git-http-backend(1) documents the variables."""
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": headers.get("content-type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": headers.get("content-encoding", ""),
            "GIT_PROTOCOL": headers.get("git-protocol", ""),
        }
        done = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, check=True)
        return done.stdout


def certificate(folder: Path, host: str = "") -> tuple[Path, Path]:
    """Write a self-signed certificate for a host name, or for 127.0.0.1, and its key, valid for a day. Return both
    paths."""
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
    target, secret = folder / "certificate.pem", folder / "key.pem"
    target.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return target, secret


TOKEN = "token-of-the-playground"  # noqa: S105 — valid for the playground only
WEBHOOK_SECRET = "secret-of-the-playground"  # noqa: S105 — valid for the playground only


class Clone:
    """A clone of the repository, from which changes are pushed."""

    def __init__(self, folder: Path, remote: Path) -> None:
        """remote: a bare repository, made here if there is none."""
        self.folder = folder
        self.remote = remote
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder.parent),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_AUTHOR_NAME": "Ada Author",
            "GIT_AUTHOR_EMAIL": "ada@example.com",
            "GIT_COMMITTER_NAME": "Ada Author",
            "GIT_COMMITTER_EMAIL": "ada@example.com",
        }
        if not remote.exists():
            self.git("init", "--quiet", "--bare", "--initial-branch=main", str(remote), at=folder.parent)
        self.git("init", "--quiet", "--initial-branch=main", str(folder), at=folder.parent)

    def git(self, *arguments: str, at: Path | None = None, **environment: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=at or self.folder,
            env=self._environment | environment,
            check=True,
            capture_output=True,
            text=True,
            errors="surrogateescape",
        )
        return done.stdout.strip()

    def write(self, path: str, content: str | bytes) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    def push(self, message: str = "A change") -> str:
        """Commit and push everything in the folder. Return the commit."""
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        self.git("push", "--quiet", "--force", str(self.remote), "HEAD:main")
        return self.git("rev-parse", "HEAD")


class GitPlayground:
    inside = "ines@example.com"
    outside = "otto@example.com"

    def __init__(self, folder: Path, backend: Backend, url: str, misbehaving: Misbehaving) -> None:
        self.misbehaving = misbehaving
        self._clone = Clone(folder / "work", backend.root / "wiki.git")
        self.backend = backend
        self._access_file = folder / "access.toml"
        self._secret: list[str] = []
        self._members = [self.inside]
        self._paths: dict[str, str] = {}
        self._removed: dict[str, str] = {}
        self.ids: dict[str, str] = {}
        self._sent: list[Request] = []
        self._rewritten = 0
        self.environment: Mapping[str, str] = {"GIT_TOKEN": TOKEN, "GIT_WEBHOOK_SECRET": WEBHOOK_SECRET}
        self.options: Mapping[str, Any] = {
            "url": f"{url}/wiki.git",
            "ca_file": str(folder / "certificate.pem"),
            "page_documents": 3,
            "access_file": str(self._access_file),
            "token": {"env": "GIT_TOKEN"},
            "webhook_secret": {"env": "GIT_WEBHOOK_SECRET"},
        }
        self._write_access()

    async def write(self, name: str, text: str) -> str:
        path = self._paths.setdefault(name, f"docs/{name}/page.md")
        self._removed.pop(name, None)
        self._clone.write(path, text)
        await self._push()
        return self.ids.setdefault(name, path)

    async def move(self, name: str) -> None:
        old = self._paths[name]
        new = f"moved/{old}"
        self._clone.write(new, (self._clone.folder / old).read_bytes())
        (self._clone.folder / old).unlink()
        self._paths[name] = new
        await self._push()

    async def relabel(self, name: str) -> None:
        """Move it to another folder, under its name."""
        await self.move(name)

    async def remove(self, name: str) -> None:
        file = self._clone.folder / self._paths[name]
        self._removed[name] = file.read_text()
        file.unlink()
        await self._push()

    async def restore(self, name: str) -> None:
        await self.write(name, self._removed[name])

    async def restrict(self, name: str) -> None:
        """Add a rule for its folder to the access file: git has no access control."""
        self._secret.append(f"{self._paths[name].rpartition('/')[0]}/")
        self._write_access()

    async def leave(self) -> None:
        self._members = []
        self._write_access()

    async def add_places(self) -> Mapping[str, str]:
        """Add nothing: the entries name the whole repository."""
        return {}

    def sent(self) -> Sequence[Request]:
        sent, self._sent = self._sent, []
        return sent

    async def trouble(
        self, *, throttled: int = 0, failing: int = 0, truncated: bool = False, expired: bool = False
    ) -> None:
        """truncated: remove the repository's branch, the only way in which git lists less than there is. expired:
        rewrite every commit of the history, with the same files and times."""
        self.backend.throttled, self.backend.failing = throttled, failing
        hidden = self._clone.remote / "hidden-main"
        branch = self._clone.remote / "refs" / "heads" / "main"
        if truncated and branch.exists():
            branch.rename(hidden)
        elif hidden.exists() and not truncated:
            hidden.rename(branch)
        if expired:
            self._rewritten += 1
            message = f"sed '1s/^/Rewritten {self._rewritten}: /'"
            await asyncio.to_thread(
                self._clone.git,
                "filter-branch",
                "--force",
                "--msg-filter",
                message,
                "HEAD",
                FILTER_BRANCH_SQUELCH_WARNING="1",
            )
            await self._push()

    async def _push(self) -> None:
        commit = await asyncio.to_thread(self._clone.push)
        body = json.dumps({"ref": "refs/heads/main", "after": commit}).encode()
        signature = "sha256=" + hmac.new(WEBHOOK_SECRET.encode(), body, hashlib.sha256).hexdigest()
        self._sent.append(Request({"x-github-event": "push", "x-hub-signature-256": signature}, {}, body))

    def _write_access(self) -> None:
        rules = [{"paths": [path], "acl_tags": ["user:nobody-here@example.com"]} for path in self._secret]
        lines = ['acl_tags = ["team"]']
        for rule in rules:
            lines += ["[[rules]]", *(f"{key} = {json.dumps(value)}" for key, value in rule.items())]
        lines += ["[members]", f"team = {json.dumps(self._members)}"]
        self._access_file.write_text("\n".join(lines) + "\n")


@asynccontextmanager
async def playing() -> AsyncIterator[GitPlayground]:
    with tempfile.TemporaryDirectory(prefix="penstock-git-") as name:
        folder = Path(name)
        (folder / "served").mkdir()
        secret = basic("x-access-token", SecretStr(TOKEN))
        backend = Backend(folder / "served", f"Basic {secret}")
        misbehaving = Misbehaving(backend)
        async with served(misbehaving, tls=certificate(folder)) as url:
            yield GitPlayground(folder, backend, url, misbehaving)
