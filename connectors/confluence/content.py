"""Pages and attachments as documents. An attachment is downloaded to a temporary folder and read in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from connectors.confluence.client import path_segment
from connectors.confluence.markup import Room, TooLong, markdown, users
from connectors.confluence.model import Comment, Content, parse_time
from connectors.extraction import Unreadable as NoText
from connectors.extraction import extract_file
from connectors.files import temporary_file
from connectors.set_aside import code_of
from connectors.source import Document, Entry, Gone, Unreadable
from connectors.web import Forbidden, Missing, TooLarge, Web
from pipeline.core.errors import PenstockError
from topics.messages import MAX_CONTENT_BYTES, Metadata

MAX_STORAGE_CHARACTERS = 4 * MAX_CONTENT_BYTES
"""The most characters of storage format that are converted."""
ATTACHMENTS_PATH = "/pages/viewpageattachments.action?pageId="
"""A page's attachments, for people. Each API links to them differently; this address works in both flavours."""
MAX_TITLE_CHARACTERS, MAX_URL_CHARACTERS = 4_000, 8_000


def people_ids(content: Content) -> set[str]:
    """Return the ids of everybody whom the document names."""
    ids = {comment.author for comment in content.comments} | {content.author}
    for text in (content.body or "", *(comment.body for comment in content.comments)):
        if len(text) <= MAX_STORAGE_CHARACTERS:
            ids |= users(text)
    return ids - {""}


def page(content: Content, names: Mapping[str, str], base: str | None) -> Entry:
    """Convert a page or blog post with its comments. ``names`` holds display names by person id; ``base`` is the base
    address of links for people."""
    if content.required_tags is None:
        return access_unknown(content)
    length = len(content.body or "") + sum(len(comment.body) for comment in content.comments)
    try:
        text = None if length > MAX_STORAGE_CHARACTERS else _text(content, names)
    except TooLong:
        text = None
    if text is None or len(text.encode()) > MAX_CONTENT_BYTES:
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
    acl, required_tags = content.tags
    metadata: Metadata = {"space": content.space, "type": content.kind}
    if content.container:
        metadata["page"] = content.container
    if content.labels:
        metadata["labels"] = [*content.labels]
    metadata |= {key: value for key, value in more.items() if isinstance(value, str | int | float | bool)}
    where = f"{ATTACHMENTS_PATH}{content.container}" if content.kind == "attachment" else content.webui
    url = f"{base}{where}" if base and where.startswith("/") else None
    return Document(
        external_id=content.id,
        title=content.title[:MAX_TITLE_CHARACTERS],
        content=text,
        media_type=media_type,
        acl_tags=acl,
        required_tags=required_tags,
        revision=content.revision,
        source_url=url if url and len(url) <= MAX_URL_CHARACTERS else None,
        author=names.get(content.author) or None,
        source_modified_at=max(
            parse_time(modified_at)
            for modified_at in (content.modified_at, *(comment.modified_at for comment in content.comments))
        ),
        metadata=metadata,
    )


def access_unknown(content: Content) -> Unreadable:
    """Return an entry for content whose readers cannot be determined. It admits nobody."""
    return Unreadable(
        external_id=content.id,
        code="access_unknown",
        acl_tags=(),
        revision=content.revision,
        message="its restrictions, or those of a page or folder above it, cannot be read: let the connector's account"
        " view them; until then nobody finds it",
    )


def unavailable(id_: str, content: Content | None, error: PenstockError) -> Unreadable:
    """Return an entry for a document whose text Confluence does not return. ``content`` shows its access; without it
    nobody may read the document. The entry has no revision, so that every sweep reads the document again."""
    acl, required_tags = content.tags if content else ((), ())
    return Unreadable(
        external_id=id_,
        code=code_of(error),
        acl_tags=acl,
        required_tags=required_tags,
        message=f"{error}: it is tried again with every sweep",
    )


def unreadable(content: Content, code: str, message: str) -> Unreadable:
    acl, required_tags = content.tags
    return Unreadable(
        external_id=content.id,
        code=code,
        message=message,
        acl_tags=acl,
        required_tags=required_tags,
        revision=content.revision,
    )


def _text(content: Content, names: Mapping[str, str]) -> str:
    """Return the text of a page with its comments. The text of an empty page is its title, by which it can be found."""
    room = Room()
    body = markdown(content.body or "", names, room) or content.title
    comments = _comments(content.comments, names, room)
    return f"{body}\n\n## Comments\n\n{comments}" if comments else body


def _comments(comments: Sequence[Comment], names: Mapping[str, str], room: Room) -> str:
    """Convert comments in the order of their threads. Each names its author and its subject, because a chunk of it may
    be returned alone."""
    ids = {comment.id for comment in comments}
    replies: dict[str | None, list[Comment]] = {}
    for comment in sorted(comments, key=lambda comment: (len(comment.id), comment.id)):
        replies.setdefault(comment.parent if comment.parent in ids else None, []).append(comment)
    parts: list[str] = []
    pending = [(comment, False) for comment in reversed(replies.get(None, []))]
    while pending:
        comment, is_reply = pending.pop()
        if text := markdown(comment.body, names, room):
            author = names.get(comment.author) or "Somebody"
            selection = " ".join((comment.selection or "").split())
            relation = "answers" if is_reply else f"about “{selection}”" if selection else ""
            parts.append(f"**{author}**{f' {relation}' if relation else ''}:\n\n{text}")
        pending += [(comment, True) for comment in reversed(replies.get(comment.id, []))]
    return "\n\n".join(parts)


class Files:
    """Downloads attachments and extracts their text."""

    def __init__(self, web: Web, folder: Path, *, cloud: bool, max_bytes: int) -> None:
        self._web, self._folder, self._cloud, self._max_bytes = web, folder, cloud, max_bytes

    async def read(self, attachment: Content, names: Mapping[str, str], base: str | None) -> Entry:
        """Convert an attachment. Raises Retryable while the source is unavailable."""
        if attachment.required_tags is None:
            return access_unknown(attachment)
        too_large = f"is larger than {self._max_bytes:,} bytes: raise max_attachment_bytes, or divide the file"
        if attachment.size > self._max_bytes:
            return unreadable(attachment, "too_large", too_large)
        try:
            with temporary_file(self._folder) as file:
                await self._web.download(self._address(attachment), file, max_bytes=self._max_bytes)
                extracted = await extract_file(file, attachment.title, attachment.media_type or None)
        except Missing:
            return Gone(attachment.id)
        except TooLarge:
            return unreadable(attachment, "too_large", too_large)
        except Forbidden:
            message = "redirects to a host that is not allowed: if the host is your own, add it to media_hosts"
            return unreadable(attachment, "forbidden_address", message)
        except NoText as error:
            return unreadable(attachment, error.code, str(error))
        return document(attachment, extracted.text, extracted.media_type, names, base, extracted.metadata)

    def _address(self, attachment: Content) -> str:
        """Return the address of a download, relative to the base address. In Cloud it redirects to the media store
        (https://developer.atlassian.com/cloud/confluence/rest/v1/api-group-content---attachments/); in Data Center it
        is the link of the response."""
        if self._cloud:
            container, id_ = path_segment(attachment.container or ""), path_segment(attachment.id)
            return f"rest/api/content/{container}/child/attachment/{id_}/download"
        return (
            attachment.download
            or f"download/attachments/{path_segment(attachment.container or '')}/{path_segment(attachment.title)}"
        )
