"""Issues as documents: the issue with the comments that everybody may read, its other comments, and its files. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from connectors.confluence.markup import Room, TooLong, markdown
from connectors.extract import extracted_revision
from connectors.files import may_hold_text
from connectors.jira import adf
from connectors.jira.access import NOBODY, Access, access_of, comment_tags
from connectors.jira.model import Attachment, Comment, Issue, Project, Rules, parse_time
from connectors.jira.options import JiraOptions
from connectors.room import hold
from connectors.set_aside import code_of
from connectors.source import Document, Listed, Unreadable
from pipeline.core.errors import PenstockError
from topics.messages import MAX_CONTENT_BYTES, Metadata

MAX_BODY_CHARACTERS = 4 * MAX_CONTENT_BYTES
"""The most characters of a text that are converted."""
MAX_TITLE_CHARACTERS, MAX_URL_CHARACTERS = 4_000, 8_000
COMMENTS, ATTACHMENT = "comments", "attachment"
"""The kinds of documents besides issues, in their ids: ``ISSUE/comments/READERS`` and ``ISSUE/attachment/ID``."""
_TEXTLESS_TYPES = ("image/", "video/", "audio/", "font/")
_WIKI_FILE = re.compile(r"!([^!|\n]{1,255}+)(?:\|[^!\n]*+)?!|\[\^([^\]\n]{1,255}+)\]")
"""A picture or file in wiki markup."""


def split_id(external_id: str) -> str | None:
    """Return the id of the issue to which a document belongs; None: the id is not one of ours."""
    issue, _, rest = external_id.partition("/")
    if not (issue.isascii() and issue.isdecimal() and len(issue) < 20):
        return None
    return issue if not rest or rest.startswith((f"{COMMENTS}/", f"{ATTACHMENT}/")) else None


@dataclass(frozen=True, slots=True)
class Part:
    """One document of an issue."""

    external_id: str
    access: Access
    revision: str
    comments: Sequence[Comment] = ()
    attachment: Attachment | None = None

    @property
    def listed(self) -> Listed:
        return Listed(
            external_id=self.external_id,
            acl_tags=self.access.acl_tags,
            required_tags=self.access.required_tags,
            revision=self.revision,
        )

    def unreadable(self, code: str, message: str, *, revision: str | None) -> Unreadable:
        return Unreadable(
            external_id=self.external_id,
            code=code,
            message=message,
            acl_tags=self.access.acl_tags,
            required_tags=self.access.required_tags,
            revision=revision,
        )


def parts(issue: Issue, project: Project, rules: Rules, options: JiraOptions) -> list[Part]:
    """Return all documents of an issue, the issue itself first. Comments that are restricted in the same way are one
    document, which holds nothing that some of its readers may not see; those whose restriction is not understood are
    left out."""
    if issue.is_archived:
        return []
    access = access_of(issue, rules, options)
    public: list[Comment] = []
    restricted: dict[tuple[str, ...], list[Comment]] = {}
    hidden: list[Comment] = []
    for comment in issue.comments:
        tags = comment_tags(comment, project, rules)
        if tags is None:
            hidden.append(comment)
        elif tags:
            restricted.setdefault(tags, []).append(comment)
        else:
            public.append(comment)
    public = public if options.comments else []
    documents = [Part(issue.id, access, _revision(issue, public), tuple(public))]
    for tags, comments in sorted(restricted.items()) if options.comments else ():
        # Without the project's id, so that the document stays the same when the issue is moved.
        readers = "+".join(tag if tag.startswith("group:") else tag.replace(f":{issue.project}", "", 1) for tag in tags)
        documents.append(
            Part(
                f"{issue.id}/{COMMENTS}/{readers}",
                access.requiring(tags),
                _digest([_labels(issue), _versions(comments)]),
                tuple(comments),
            )
        )
    if options.attachments:
        narrower = [(tags, _Shown.of(comments)) for tags, comments in [(None, hidden), *restricted.items()]]
        documents += [
            Part(
                f"{issue.id}/{ATTACHMENT}/{attachment.id}",
                _access_of_file(attachment, access, narrower),
                extracted_revision(_digest([_labels(issue), attachment.name, attachment.size, attachment.created])),
                attachment=attachment,
            )
            for attachment in issue.attachments
            if _may_hold_text(attachment)
        ]
    return documents


def _may_hold_text(attachment: Attachment) -> bool:
    return may_hold_text(attachment.name, attachment.size) and not attachment.media_type.startswith(_TEXTLESS_TYPES)


@dataclass(frozen=True, slots=True)
class _Shown:
    """The files that comments show, looked for once: an issue may have thousands of both."""

    names: frozenset[str]
    has_unnamed: bool
    """Whether a comment shows a file whose name it does not say: it may be any."""

    @classmethod
    def of(cls, comments: Iterable[Comment]) -> _Shown:
        names = {name for comment in comments for name in _files_in(comment)}
        return cls(frozenset(names - {""}), "" in names)


def _access_of_file(
    attachment: Attachment, access: Access, restricted: Iterable[tuple[tuple[str, ...] | None, _Shown]]
) -> Access:
    """Return the access of a file. One that a restricted comment shows was attached with it: Jira hides it from whom it
    hides the comment."""
    for tags, shown in restricted:
        if shown.has_unnamed or attachment.name in shown.names:
            access = access.requiring(tags)
    return access


@dataclass(frozen=True, slots=True)
class _Packed:
    """A comment's text and its HTML."""

    json: bytes
    """The objects that a document of ADF is made of take up to twelve times the memory."""


@dataclass(frozen=True, slots=True)
class _Omitted:
    """Stands in the place of a comment's text."""

    shown: tuple[str, ...]
    """The names of the issue's files that the comment shows, and an empty one where ``_files_in`` yields it."""


def packed(comment: Comment) -> tuple[Comment, int]:
    """Return the comment in less memory, and the bytes of its text."""
    text = json.dumps([comment.body, comment.rendered], ensure_ascii=False, separators=(",", ":"))
    body = _Packed(text.encode("utf-8", "surrogatepass"))
    hold((body.json,))
    return replace(comment, body=body, rendered=None), len(body.json)


def without_text(comment: Comment, names: Mapping[str, str]) -> Comment:
    """Return the comment with the names of the files that it shows in the place of its text: a listing needs no more,
    and a document has no text of an issue whose comments are too long. names: ``file_names`` of the issue."""
    shown = {names[name] for name in _files_in(comment) if name in names}
    return replace(comment, body=_Omitted(tuple(shown)), rendered=None)


def file_names(issue: Issue) -> Mapping[str, str]:
    """Return the names of an issue's files, and the empty one, each by itself: so that a name is in memory once,
    although very many comments show it."""
    return {"": "", **{file.name: file.name for file in issue.attachments}}


def _texts(comment: Comment) -> tuple[Any, str | None]:
    """Return the body of a comment, and its HTML."""
    if isinstance(comment.body, _Packed):
        body, rendered = json.loads(comment.body.json)
        return body, rendered
    return comment.body, comment.rendered


def _length(comment: Comment) -> int:
    return len(comment.body.json) if isinstance(comment.body, _Packed) else len(str(comment.body))


def _files_in(comment: Comment) -> Iterator[str]:
    """Yield the names of the files that a comment shows, and an empty one for a file whose name it does not say."""
    if isinstance(comment.body, _Omitted):
        yield from comment.body.shown
        return
    body, _ = _texts(comment)
    if isinstance(body, str):
        for match in _WIKI_FILE.finditer(body):
            yield match[1] or match[2]
        return
    if body and not isinstance(body, Mapping):
        yield ""  # nobody knows what it shows
    for node in adf.nodes(body):
        if node.get("type") in ("media", "mediaInline"):
            attributes = node.get("attrs")
            attributes = attributes if isinstance(attributes, Mapping) else {}
            if attributes.get("type") not in ("external", "link"):
                name = attributes.get("alt")
                yield "" if name is None else str(name)


def _labels(issue: Issue) -> list[Any]:
    """Return what people call an issue and its project: both may be renamed or moved without an update."""
    return [issue.key, issue.name("summary"), issue.name("project")]


def _versions(comments: Iterable[Comment]) -> list[list[str]]:
    return sorted([comment.id, comment.updated] for comment in comments)


def _revision(issue: Issue, comments: Sequence[Comment]) -> str:
    """Return the revision of an issue. Renaming a status or a label of it, and deleting a comment, may leave
    ``updated`` as it is, so they count separately."""
    return _digest([_labels(issue), issue.updated, _metadata(issue), _versions(comments)])


def _digest(state: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]


def _metadata(issue: Issue) -> Metadata:
    project = issue.fields.get("project")
    key = str(project.get("key") or "") if isinstance(project, Mapping) else ""
    single = {
        "type": issue.name("issuetype"),
        "status": issue.name("status"),
        "resolution": issue.name("resolution"),
        "priority": issue.name("priority"),
        "assignee": issue.name("assignee"),
        "reporter": issue.name("reporter"),
        "parent": str((issue.fields.get("parent") or {}).get("key") or ""),
    }
    several = {name: issue.names(field) for name, field in _LISTS.items()}
    return {
        "kind": "issue",
        "project": key,
        "key": issue.key,
        **{name: value for name, value in single.items() if value},
        **{name: [*values] for name, values in several.items() if values},
    }


_LISTS = {"labels": "labels", "components": "components", "fix_versions": "fixVersions"}


def url(issue: Issue, base: str | None, comment: Comment | None = None) -> str | None:
    """Return the address for people. base: the site's address."""
    if base is None:
        return None
    address = f"{base}/browse/{issue.key}" + (f"?focusedCommentId={comment.id}" if comment else "")
    return address if len(address) <= MAX_URL_CHARACTERS else None


def document(part: Part, issue: Issue, base: str | None) -> Document | Unreadable:
    """Convert an issue, or its comments with one restriction."""
    is_issue = part.external_id == issue.id
    bodies = [issue.fields.get("description"), issue.fields.get("environment")] if is_issue else []
    length = sum(len(str(body)) for body in bodies) + sum(map(_length, part.comments))
    try:
        is_omitted = any(isinstance(comment.body, _Omitted) for comment in part.comments)
        is_too_long = is_omitted or length > MAX_BODY_CHARACTERS
        text = None if is_too_long else _text(part, issue, is_issue=is_issue)
    except TooLong:
        text = None
    if text is None or len(text.encode()) > MAX_CONTENT_BYTES:
        message = f"holds more than {MAX_CONTENT_BYTES:,} bytes of text: continue in a new issue"
        return part.unreadable("too_large", message, revision=part.revision)
    title = f"{issue.key}: {' '.join(issue.name('summary').split())}"
    return Document(
        external_id=part.external_id,
        title=(title if is_issue else f"Comments on {title}")[:MAX_TITLE_CHARACTERS],
        content=text,
        media_type="text/markdown",
        acl_tags=part.access.acl_tags,
        required_tags=part.access.required_tags,
        revision=part.revision,
        source_url=url(issue, base, None if is_issue else part.comments[-1]),
        author=(issue.name("reporter") if is_issue else part.comments[0].author) or None,
        source_modified_at=_modified_at(part, issue, is_issue=is_issue),
        metadata={**_metadata(issue), "comments": len(part.comments)}
        if is_issue
        else {**file_metadata(issue, COMMENTS), "comments": len(part.comments)},
    )


def file_metadata(issue: Issue, kind: str) -> dict[str, str]:
    """Return the metadata of a document that belongs to an issue."""
    return {"kind": kind, "project": str(_metadata(issue)["project"]), "key": issue.key, "issue": issue.id}


def _modified_at(part: Part, issue: Issue, *, is_issue: bool) -> datetime:
    times = [comment.updated for comment in part.comments]
    return max(parse_time(moment) for moment in ([issue.updated, *times] if is_issue else times))


def unavailable(external_id: str, part: Part | None, error: PenstockError) -> Unreadable:
    """Return an entry for a document whose text Jira does not return. ``part`` shows its access; without it nobody may
    read the document. The entry has no revision, so that every sweep reads the document again."""
    part = part or Part(external_id, NOBODY, "")
    return part.unreadable(code_of(error), f"{error}: it is tried again with every sweep", revision=None)


def _text(part: Part, issue: Issue, *, is_issue: bool) -> str:
    """Return the text of a document. The text of an empty issue is its summary, by which it can be found."""
    room = Room()
    comments = "\n\n".join(_comment(comment, room) for comment in part.comments)
    if not is_issue:
        return comments or issue.name("summary")
    sections = [
        _body(issue.fields.get("description"), issue.rendered.get("description"), room) or issue.name("summary")
    ]
    if environment := _body(issue.fields.get("environment"), issue.rendered.get("environment"), room):
        sections.append(f"## Environment\n\n{environment}")
    if comments:
        sections.append(f"## Comments\n\n{comments}")
    return "\n\n".join(sections)


def _comment(comment: Comment, room: Room) -> str:
    """Convert a comment. It names its author, because a chunk of it may be returned alone."""
    return f"**{comment.author or 'Somebody'}**:\n\n{_body(*_texts(comment), room)}"


def _body(body: Any, rendered: Any, room: Room) -> str:
    """Convert a text: a document of ADF, or the HTML of one in wiki markup."""
    if isinstance(body, str):
        return markdown(rendered, room=room) if isinstance(rendered, str) and rendered.strip() else body.strip()
    if body and not isinstance(body, Mapping):
        raise TypeError("a text is neither wiki markup nor a document of ADF")
    return markdown(adf.storage(body), room=room)
