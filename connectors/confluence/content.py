"""Pages and attachments as documents. An attachment is downloaded to a temporary folder and read in the sandbox."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from connectors.confluence.client import safe
from connectors.confluence.markup import markdown, users
from connectors.confluence.model import Content, Remark, instant
from connectors.extraction import Unreadable as NoText
from connectors.extraction import extract_file
from connectors.source import Document, Entry, Gone, Unreadable
from connectors.web import Forbidden, Missing, TooLarge, Web
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
    content: Content,
    text: str,
    media_type: str,
    names: Mapping[str, str],
    base: str | None,
    more: Mapping[str, object] = {},
) -> Document:
    acl, required = content.tags
    metadata: Metadata = {"space": content.space, "type": content.kind}
    if content.container:
        metadata["page"] = content.container
    metadata |= {key: value for key, value in more.items() if isinstance(value, str | int | float | bool)}
    where = f"{ATTACHMENTS}{content.container}" if content.kind == "attachment" else content.webui
    url = f"{base}{where}" if base and where.startswith("/") else None
    return Document(
        external_id=content.id,
        title=content.title[:MAX_TITLE],
        content=text,
        media_type=media_type,
        acl_tags=acl,
        required_tags=required,
        revision=content.revision,
        source_url=url if url and len(url) <= MAX_URL else None,
        author=names.get(content.author) or None,
        source_modified_at=max(instant(when) for when in (content.when, *(one.when for one in content.remarks))),
        metadata=metadata,
    )


def hidden(content: Content) -> Unreadable:
    """Who may read it cannot be told: nobody does."""
    return Unreadable(
        external_id=content.id,
        code="access_unknown",
        acl_tags=(),
        revision=content.revision,
        message="its restrictions, or those of a page or folder above it, cannot be read: let the connector's account"
        " view them; until then nobody finds it",
    )


def unreadable(content: Content, code: str, message: str) -> Unreadable:
    acl, required = content.tags
    return Unreadable(
        external_id=content.id,
        code=code,
        message=message,
        acl_tags=acl,
        required_tags=required,
        revision=content.revision,
    )


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


class Files:
    def __init__(self, web: Web, folder: Path, *, cloud: bool, max_bytes: int) -> None:
        self._web, self._folder, self._cloud, self._max_bytes = web, folder, cloud, max_bytes

    async def read(self, attachment: Content, names: Mapping[str, str], base: str | None) -> Entry:
        """Raises what the client raises for a source that is away."""
        if attachment.required is None:
            return hidden(attachment)
        too_large = f"is larger than {self._max_bytes:,} bytes: raise max_attachment_bytes, or divide the file"
        if attachment.size > self._max_bytes:
            return unreadable(attachment, "too_large", too_large)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"attachment-{secrets.token_hex(8)}"
        try:
            await self._web.download(self._address(attachment), file, max_bytes=self._max_bytes)
            found = await extract_file(file, attachment.title, attachment.media_type or None)
        except Missing:
            return Gone(attachment.id)
        except TooLarge:
            return unreadable(attachment, "too_large", too_large)
        except Forbidden:
            message = "lies at an address that may not be asked: if the host is your own, add it to media_hosts"
            return unreadable(attachment, "forbidden_address", message)
        except NoText as error:
            return unreadable(attachment, error.code, str(error))
        finally:
            file.unlink(missing_ok=True)
        return document(attachment, found.text, found.media_type, names, base, found.metadata)

    def _address(self, attachment: Content) -> str:
        """Cloud: https://developer.atlassian.com/cloud/confluence/rest/v1/api-group-content---attachments/, which
        redirects to the media store; Data Center: the link that its answer holds, relative to the base address."""
        if self._cloud:
            container, id_ = safe(attachment.container or ""), safe(attachment.id)
            return f"rest/api/content/{container}/child/attachment/{id_}/download"
        return (
            attachment.download or f"download/attachments/{safe(attachment.container or '')}/{safe(attachment.title)}"
        )
