"""Makes a document of a file, for sources whose documents are files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path

from connectors.extraction.result import Unreadable as UnreadableFile
from connectors.extraction.sandbox import extract_file
from connectors.source import Document, Unreadable
from topics.messages import Scalar


async def document_from_file(
    path: Path,
    name: str,
    *,
    external_id: str,
    acl_tags: Collection[str],
    required_tags: Collection[str] = (),
    revision: str | None = None,
    media_type: str | None = None,
    source_url: str | None = None,
    author: str | None = None,
    source_modified_at: datetime | None = None,
    metadata: Mapping[str, Scalar | list[Scalar] | None] | None = None,
) -> Document | Unreadable:
    """Return a document with the text of a file, or an entry that says why it has none.

    name: the file's name at its source: the title of a file that has none, and with ``media_type`` what decides the
    kind of an ambiguous file. The other arguments are fields of the document. Raises OSError if the file cannot be
    opened, and Retryable while the extraction service cannot read it.
    """
    try:
        extracted = await extract_file(path, name, media_type)
    except UnreadableFile as error:
        return Unreadable(
            external_id=external_id,
            code=error.code,
            message=f"{name} {error}",
            acl_tags=acl_tags,
            required_tags=required_tags,
            revision=revision,
        )
    return Document(
        external_id=external_id,
        title=extracted.title or name,
        content=extracted.text,
        media_type=extracted.media_type,
        acl_tags=acl_tags,
        required_tags=required_tags,
        revision=revision,
        source_url=source_url,
        author=author or extracted.author,
        source_modified_at=source_modified_at,
        metadata={**extracted.metadata, **(metadata or {})},
    )
