"""The keyword entry of a chunk, for the sink that writes it and the audit that checks it."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from pipeline.core.identifiers import terms, words_of_names
from pipeline.core.identity import EVERYONE
from pipeline.core.languages import language_of
from pipeline.core.model import Span
from pipeline.ledger.work import Work


def to_the_hour(moment: datetime) -> datetime:
    """Round a time of modification down to the hour, for the keyword entry. Nearly every edit changes this time, and
    would otherwise rewrite every entry of the document. A search filters by the hour in Elasticsearch, and then by the
    exact time in the ledger."""
    try:
        return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    except OverflowError:  # within a day of datetime.min or datetime.max
        return moment


def common_fields(w: Work, metadata: Mapping[str, object]) -> dict[str, object]:
    """The fields that all entries of a document share."""
    required = [EVERYONE, *w.required_tags]
    return {
        "document_id": str(w.identity.id),
        "tenant": w.identity.tenant,
        "source": w.identity.source,
        "external_id": w.identity.external_id,
        "title": w.title,
        "acl_tags": list(w.acl_tags),
        "required_tags": required,
        "required_count": len(required),
        "source_url": w.source_url,
        "author": w.author,
        "media_type": w.media_type,
        "source_modified_at": to_the_hour(w.source_modified_at).isoformat() if w.source_modified_at else None,
        "metadata": dict(metadata),
        **({"keys": list(w.keys)} if w.keys else {}),  # entries from before there were keys stay as they are
    }


def cut(body: str, spans: Sequence[Span]) -> str:
    """A chunk's text: the pieces of the normalised text at these spans, joined."""
    return "".join(body[start:end] for start, end in spans)


def entries(
    w: Work, body: str, metadata: Mapping[str, object], only: Container[UUID] | None = None
) -> Iterator[tuple[UUID, dict[str, Any]]]:
    """Yield every desired chunk and its entry, in reading order. body: the normalised text that the manifest was built
    from. only: yield these chunks alone; None: all."""
    if not w.chunk_ids or w.manifest is None:
        return
    common = common_fields(w, metadata)
    for chunk, spans, headings in zip(w.chunk_ids, w.manifest.spans, w.manifest.headings, strict=True):
        if only is None or chunk in only:
            yield chunk, {**common, **content_fields(w.title, headings, cut(body, spans))}


def content_fields(title: str, headings: Sequence[str], text: str) -> dict[str, Any]:
    """The fields of an entry that follow from its chunk, with the title, which its document's entries share."""
    own: dict[str, Any] = {"title": title, "text": text, "headings": list(headings)}
    if words := words_of_names(title):
        own["title_words"] = words
    if language := language_of(text):
        own["analysed"] = {language: dict(own)}
    return {**own, "identifiers": terms("\n".join((title, *headings, text)))}
