"""A fake S3 with one bucket, over HTTP: what a reader needs (ListObjectsV2, HeadObject, GetObject), as
https://docs.aws.amazon.com/AmazonS3/latest/API describes it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from urllib.parse import quote
from xml.sax.saxutils import escape

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

BUCKET = "documents"
KEY, SECRET = "key-of-the-reader", "secret-of-the-reader"  # they open nothing else
PAGE = 1000
"""The most keys in one page of a listing."""


@dataclass(frozen=True, slots=True)
class Stored:
    content: bytes
    modified_at: datetime
    number: int
    """Another one after each write: the etag of S3 is not always a digest of the content."""

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.content, usedforsecurity=False).hexdigest()}-{self.number}"'


@dataclass
class FakeS3:
    """An ASGI application. ``objects`` are those of the bucket, by key."""

    objects: dict[str, Stored] = field(default_factory=dict)
    page: int = PAGE
    throttled: int = 0
    failing: int = 0
    encrypted: set[str] = field(default_factory=set)
    """Keys of objects that only who has their writer's key of encryption can read or describe."""

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._app = Starlette(
            routes=[
                Route(f"/{BUCKET}", self._list, methods=["GET"]),
                Route(f"/{BUCKET}/{{key:path}}", self._object, methods=["GET", "HEAD"]),
            ]
        )

    def put(self, key: str, content: bytes) -> None:
        self.objects[key] = Stored(content, datetime.now(UTC), next(self._numbers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fault = self._fault(dict(scope["headers"]).get(b"authorization", b"").decode())
        await (fault or self._app)(scope, receive, send)

    def _fault(self, authorization: str) -> Response | None:
        if self.throttled:
            self.throttled -= 1
            return _error(503, "SlowDown", "Please reduce your request rate.")
        if self.failing:
            self.failing -= 1
            return _error(500, "InternalError", "We encountered an internal error. Please try again.")
        if not authorization.startswith("AWS4-HMAC-SHA256"):
            return _error(403, "AccessDenied", "Access Denied")
        if f"Credential={KEY}/" not in authorization:
            return _error(403, "InvalidAccessKeyId", "The access key ID does not exist in our records.")
        return None

    async def _list(self, request: Request) -> Response:
        query = request.query_params
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after") or ""
        # Keys, and in place of all that share a prefix up to the delimiter this prefix, in one order.
        rows: dict[str, Stored | None] = {}
        for key in sorted(self.objects):
            if key.startswith(prefix):
                rest = key[len(prefix) :]
                folder, ends, _ = rest.partition(delimiter) if delimiter else (rest, "", "")
                rows[prefix + folder + delimiter if ends else key] = None if ends else self.objects[key]
        remaining = [(name, stored) for name, stored in rows.items() if name > after]
        shown = remaining[: min(self.page, int(query.get("max-keys", PAGE)))]
        encode = quote if query.get("encoding-type") == "url" else escape
        parts = [
            f"<Contents><Key>{encode(name)}</Key><LastModified>{stored.modified_at:%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
            f"<ETag>{escape(stored.etag)}</ETag><Size>{len(stored.content)}</Size><StorageClass>STANDARD</StorageClass>"
            "</Contents>"
            for name, stored in shown
            if stored is not None
        ]
        parts += [
            f"<CommonPrefixes><Prefix>{encode(name)}</Prefix></CommonPrefixes>"
            for name, stored in shown
            if stored is None
        ]
        if len(remaining) > len(shown):
            parts.append(f"<NextContinuationToken>{escape(shown[-1][0])}</NextContinuationToken>")
        if "encoding-type" in query:
            parts.append("<EncodingType>url</EncodingType>")
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{encode(prefix)}</Prefix><KeyCount>{len(shown)}</KeyCount>"
            f"<IsTruncated>{str(len(remaining) > len(shown)).lower()}</IsTruncated>{''.join(parts)}</ListBucketResult>"
        )
        return Response(body, media_type="application/xml")

    async def _object(self, request: Request) -> Response:
        if (stored := self.objects.get(request.path_params["key"])) is None:
            return _error(404, "NoSuchKey", "The specified key does not exist.")
        if request.path_params["key"] in self.encrypted:
            return _error(400, "InvalidRequest", "The object was stored using a form of Server Side Encryption.")
        headers = {
            "etag": stored.etag,
            "last-modified": format_datetime(stored.modified_at, usegmt=True),
            "accept-ranges": "bytes",
            "content-type": "binary/octet-stream",
        }
        if (interval := request.headers.get("range")) is None:
            return Response(stored.content, headers=headers)
        return _part(stored.content, interval, headers)


def _part(content: bytes, interval: str, headers: Mapping[str, str]) -> Response:
    first, _, last = interval.removeprefix("bytes=").partition("-")
    start, end = int(first or 0), min(int(last or len(content) - 1), len(content) - 1)
    if start > end:
        return _error(416, "InvalidRange", "The requested range is not satisfiable")
    return Response(content[start : end + 1], 206, {**headers, "content-range": f"bytes {start}-{end}/{len(content)}"})


def _error(status: int, code: str, message: str) -> Response:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return Response(body, status, media_type="application/xml")
