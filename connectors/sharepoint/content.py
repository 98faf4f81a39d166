"""Reads an item of SharePoint or OneDrive as a document, or finds the reason why it has no text."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from connectors.files import Downloads, FileType, NoText, file_type, publishable
from connectors.sharepoint.access import Access
from connectors.sharepoint.client import Graph, Json
from connectors.source import Document, Unreadable
from connectors.web import Denied, Rejected, TooLarge
from topics.messages import Metadata

Item = Mapping[str, Any]

PAGE = FileType("text/html", ".aspx")
"""The type of a site page, which is not downloaded but read from the pages API."""


def type_of(item: Item, *, is_pages_library: bool) -> FileType | None:
    """Return the type by which an item is read; None: it is no document (folders, notebooks, shortcuts, pictures,
    deleted items)."""
    if "file" not in item or any(
        item.get(facet) is not None for facet in ("deleted", "folder", "package", "remoteItem")
    ):
        return None
    name = str(item.get("name") or "")
    if is_pages_library and name.lower().endswith(".aspx"):
        return PAGE
    return file_type(name, str((item.get("file") or {}).get("mimeType") or ""))


def author(item: Item) -> str | None:
    for field in ("createdBy", "lastModifiedBy"):
        user = (item.get(field) or {}).get("user") or {}
        if name := user.get("displayName") or user.get("email"):
            return str(name)
    return None


def modified_at(item: Item) -> datetime | None:
    try:
        return datetime.fromisoformat(str(item.get("lastModifiedDateTime", "")))
    except ValueError:
        return None


def metadata(item: Item, drive: str) -> Metadata:
    values: Metadata = {"drive_id": drive, "mime_type": str((item.get("file") or {}).get("mimeType") or "")}
    parent = (item.get("parentReference") or {}).get("id")
    if parent:
        values["folder_id"] = str(parent)
    return values


def site_metadata(item: Item) -> Metadata:
    """Return the path of the item's site, such as ``sites/hr``, which its address begins with. Of the address the
    revision depends, and so it is no part of ``metadata``."""
    parts = unquote(urlsplit(str(item.get("webUrl") or "")).path).split("/")
    return {"site": "/".join(parts[1:3])} if parts[1:2] and parts[1] in _SITE_PATHS and len(parts) > 3 else {}


_SITE_PATHS = ("sites", "teams", "personal")
"""Where the addresses of sites begin; the root site has none of these."""


def revision_of(item: Item, drive: str) -> str:
    """Return a value that changes with everything that is published of an item, except its access.

    ``cTag`` and ``file.hashes`` are not used: the log of changes does not always show them (driveitem-delta, Remarks),
    and a listing would have another revision than a read.
    """
    published = [
        item.get("eTag"),
        item.get("size"),
        item.get("lastModifiedDateTime"),
        item.get("name"),
        item.get("webUrl"),
        author(item),
        metadata(item, drive),
        item.get("malware") is not None,
    ]
    return hashlib.sha256(json.dumps(published, sort_keys=True).encode()).hexdigest()[:32]


def is_draft(version: object) -> bool:
    """Whether a version, such as ``2.1``, is a draft, which only editors see. A published one ends in ``.0``."""
    _, point, minor = str(version or "").partition(".")
    return bool(point) and minor != "0"


DRAFT = NoText("draft", "has changes that are not published yet: publish it")


class Contents:
    """Reads items as documents."""

    def __init__(self, graph: Graph, folder: Path, max_bytes: int) -> None:
        """folder: holds downloads while they are read."""
        self._graph = graph
        self._downloads = Downloads(folder, max_bytes)
        self._max_bytes = max_bytes

    async def read(
        self, item: Json, external_id: str, drive: str, site: str, kind: FileType, access: Access
    ) -> Document | Unreadable:
        """Read an item of a drive of this site. Raises Missing if it has been deleted."""
        revision = revision_of(item, drive)
        name = str(item.get("name") or item["id"])
        try:
            if kind is PAGE:
                title, text, media_type = await self._page(item, site, name)
            else:
                title, (text, media_type) = name, await self._file(item, drive, kind, name)
        except NoText as error:
            return Unreadable(
                external_id=external_id,
                code=error.code,
                message=str(error),
                acl_tags=access.tags,
                revision=revision,
            )
        return Document(
            external_id=external_id,
            title=title[:4_000],
            content=text,
            media_type=media_type,
            acl_tags=access.tags,
            revision=revision,
            source_url=item.get("webUrl"),
            author=author(item),
            source_modified_at=modified_at(item),
            metadata=metadata(item, drive) | site_metadata(item),
        )

    async def _file(self, item: Json, drive: str, kind: FileType, name: str) -> tuple[str, str]:
        if item.get("malware") is not None:
            raise NoText("abusive", "is malware, according to Microsoft")
        if is_draft((item.get("publication") or {}).get("versionId")):
            raise DRAFT
        size = item.get("size")
        if isinstance(size, int) and size > self._max_bytes:
            raise NoText("too_large", f"is larger than {self._max_bytes:,} bytes: split it")
        try:
            text, media_type = await self._downloads.text(
                name, kind, lambda to, limit: self._graph.download(drive, str(item["id"]), to, limit)
            )
        except (Denied, Rejected) as error:
            raise _refused(error) from error
        except TooLarge as error:
            raise NoText("too_large", f"is larger than {error.limit:,} bytes: split it") from error
        return publishable(text), media_type

    async def _page(self, item: Json, site: str, name: str) -> tuple[str, str, str]:
        id_ = (item.get("sharepointIds") or {}).get("listItemUniqueId")
        if not id_:
            raise NoText("unsupported", "is a page of the classic experience, which Microsoft Graph does not offer")
        try:
            page = await self._graph.page(site, str(id_))
        except (Denied, Rejected) as error:
            raise _refused(error) from error
        except TooLarge as error:
            raise NoText("too_large", f"is larger than {error.limit:,} bytes: split it") from error
        state = page.get("publishingState") or {}
        if state.get("level") != "published" or is_draft(state.get("versionId")):
            raise DRAFT
        title = str(page.get("title") or name)
        body = "\n".join(page_parts(page))
        return title, publishable(f"<h1>{html.escape(title)}</h1>\n{body}" if body else ""), "text/html"


def _refused(error: Denied | Rejected) -> NoText:
    if error.status == 423:
        return NoText("locked", "the site or the file is locked")
    code = error.code or "no code"
    return NoText("denied", f"Microsoft refuses the content ({error.status}, {code}): check the permissions")


def page_parts(page: Item) -> Iterator[str]:
    """Yield the HTML of a page's web parts, in their order on the page."""
    layout = page.get("canvasLayout") or {}
    columns = [
        column for section in layout.get("horizontalSections") or () for column in (section or {}).get("columns") or ()
    ]
    for place in [*columns, layout.get("verticalSection") or {}]:
        for part in (place or {}).get("webparts") or ():
            yield from _web_part(part)


def _web_part(part: object) -> Iterator[str]:
    if not isinstance(part, Mapping):
        return
    if isinstance(part.get("innerHtml"), str) and part["innerHtml"].strip():
        yield part["innerHtml"]
    data = part.get("data")
    content = data.get("serverProcessedContent") if isinstance(data, Mapping) else None
    if not isinstance(content, Mapping):
        return
    for name, is_html in (("searchablePlainTexts", False), ("htmlStrings", True)):
        for entry in content.get(name) or ():
            text = entry.get("value") if isinstance(entry, Mapping) else None
            if isinstance(text, str) and text.strip():
                yield text if is_html else f"<p>{html.escape(text)}</p>"
