"""Content → what is published of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from connectors.confluence.model import Content, Remark, instant
from connectors.confluence.rendering import markdown
from connectors.confluence.storage import users
from connectors.source import Document, Entry, Unreadable
from topics.messages import MAX_CONTENT_BYTES, Metadata

MAX_STORAGE = 4 * MAX_CONTENT_BYTES
"""Characters of storage format that are converted at all."""
ATTACHMENTS = "/pages/viewpageattachments.action?pageId="
"""Both APIs link to an attachment in words of their own; this works in both flavours."""
MAX_TITLE, MAX_URL = 4_000, 8_000


def mentioned(content: Content) -> set[str]:
    """Ids of everybody who is named in the document."""
    found = users(content.body or "") | {one.author for one in content.remarks} | {content.author}
    for one in content.remarks:
        found |= users(one.body)
    return found - {""}


def page(content: Content, names: Mapping[str, str], base: str | None) -> Entry:
    """A page or blog post with its comments. names: by person's id. base: address for people."""
    if content.required is None:
        return hidden(content)
    length = len(content.body or "") + sum(len(one.body) for one in content.remarks)
    text = "" if length > MAX_STORAGE else _text(content, names)
    if length > MAX_STORAGE or len(text.encode()) > MAX_CONTENT_BYTES:
        message = f"holds more than {MAX_CONTENT_BYTES:,} bytes of text: divide the page"
        return unreadable(content, "too_large", message)
    return document(content, text, "text/markdown", names, base)


def document(
    content: Content, text: str, media_type: str, names: Mapping[str, str], base: str | None,
    more: Mapping[str, object] = {},
) -> Document:  # fmt: skip
    acl, required = content.tags
    metadata: Metadata = {"space": content.space, "type": content.kind}
    if content.container:
        metadata["page"] = content.container
    metadata |= {key: value for key, value in more.items() if isinstance(value, str | int | float | bool)}
    where = f"{ATTACHMENTS}{content.container}" if content.kind == "attachment" else content.webui
    url = f"{base}{where}" if base and where.startswith("/") else None
    return Document(
        external_id=content.id, title=content.title[:MAX_TITLE], content=text, media_type=media_type, acl_tags=acl,
        required_tags=required, revision=content.revision, source_url=url if url and len(url) <= MAX_URL else None,
        author=names.get(content.author) or None,
        source_modified_at=max(instant(when) for when in (content.when, *(one.when for one in content.remarks))),
        metadata=metadata,
    )  # fmt: skip


def hidden(content: Content) -> Unreadable:
    """Who may read it cannot be told: nobody does."""
    return Unreadable(
        external_id=content.id, code="access_unknown", acl_tags=(), revision=content.revision,
        message="its restrictions, or those of a page or folder above it, cannot be read: let the connector's account"
        " view them; until then nobody finds it",
    )  # fmt: skip


def unreadable(content: Content, code: str, message: str) -> Unreadable:
    acl, required = content.tags
    return Unreadable(
        external_id=content.id, code=code, message=message, acl_tags=acl, required_tags=required,
        revision=content.revision,
    )  # fmt: skip


def _text(content: Content, names: Mapping[str, str]) -> str:
    """An empty page has its title as text: it is found by its name, as in Confluence."""
    body = markdown(content.body or "", names) or content.title
    said = _comments(content.remarks, names)
    return f"{body}\n\n## Comments\n\n{said}" if said else body


def _comments(remarks: Sequence[Remark], names: Mapping[str, str]) -> str:
    """In the order of their threads. Each says who speaks and about what, for it may be found alone."""
    ids = {one.id for one in remarks}
    answers: dict[str | None, list[Remark]] = {}
    for one in sorted(remarks, key=lambda one: (len(one.id), one.id)):
        answers.setdefault(one.parent if one.parent in ids else None, []).append(one)
    parts: list[str] = []
    waiting = [(one, False) for one in reversed(answers.get(None, []))]
    while waiting:
        remark, is_answer = waiting.pop()
        if text := markdown(remark.body, names):
            who = names.get(remark.author) or "Somebody"
            about = " ".join((remark.selection or "").split())
            how = "answers" if is_answer else f"about “{about}”" if about else ""
            parts.append(f"**{who}**{f' {how}' if how else ''}:\n\n{text}")
        waiting += [(one, True) for one in reversed(answers.get(remark.id, []))]
    return "\n\n".join(parts)
