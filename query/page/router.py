"""The web page: static files that are read once and served under a path that changes whenever any of them does.

Scripts are ES modules and need no build. All files are under ``/assets/HASH/``, where HASH is one hash of all files, so
that relative imports work and a browser may cache the files for a year. The page preloads all modules, so that they are
fetched at once and not import by import. The page itself is revalidated at every visit and answered with 304 while it
is unchanged. The gate (query/http/gate.py) adds the security headers: because the page shows untrusted documents,
inline scripts do not run and nothing is loaded from other origins.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, Request, Response

TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "html": "text/html; charset=utf-8",
}
CACHED_A_YEAR = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    compressed: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, name: str, content: bytes) -> File:
        return cls(
            content,
            gzip.compress(content, mtime=0),
            TYPES[name.rpartition(".")[2]],
            f'"{sha256(content).hexdigest()[:16]}"',
        )


def _read() -> tuple[File, str, dict[str, File]]:
    """The page, the hash of everything, and its other files by name."""
    contents = {
        entry.name: entry.read_bytes()
        for entry in sorted(files("query.page").iterdir(), key=lambda entry: entry.name)
        if entry.name.rpartition(".")[2] in TYPES
    }
    together = sha256(b"".join(name.encode() + b"\0" + content + b"\0" for name, content in contents.items()))
    version = together.hexdigest()[:16]
    page = contents.pop("index.html").decode()
    modules = [name for name in contents if name.endswith(".js") and f'src="{{{{assets}}}}/{name}"' not in page]
    preloads = "\n  ".join(f'<link rel="modulepreload" href="{{{{assets}}}}/{name}">' for name in modules)
    page = page.replace("<!-- preloads -->", preloads).replace("{{assets}}", f"assets/{version}")
    return (
        File.of("index.html", page.encode()),
        version,
        {name: File.of(name, content) for name, content in contents.items()},
    )


_PAGE, VERSION, _FILES = _read()

router = APIRouter(include_in_schema=False)


@router.get("/")
def page(request: Request) -> Response:
    return _answer(request, _PAGE, "no-cache")


@router.get("/assets/{version}/{name}")
def asset(request: Request, version: str, name: str) -> Response:
    """A file of the current version. Other versions are not found, because browsers would cache the wrong content."""
    file = _FILES.get(name)
    if file is None or version != VERSION:
        return Response(status_code=404)
    return _answer(request, file, CACHED_A_YEAR)


def _answer(request: Request, file: File, caching: str) -> Response:
    headers = {"Cache-Control": caching, "ETag": file.etag, "Vary": "Accept-Encoding"}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.compressed, media_type=file.media_type, headers={**headers, "Content-Encoding": "gzip"})
    return Response(file.content, media_type=file.media_type, headers=headers)
