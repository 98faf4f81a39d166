"""Issues, pull requests and discussions as documents with the text of everything that people said in them. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from connectors.github.options import Kind
from connectors.github.queries import Repository, nodes
from connectors.source import Document, Listed, Unreadable
from pipeline.core.normalise import MESSAGES_TYPE, RECORD_SEPARATOR
from topics.messages import MAX_CONTENT_BYTES

Json = Mapping[str, Any]
SINGULAR: Mapping[Kind, str] = {"issues": "issue", "pull_requests": "pull request", "discussions": "discussion"}
_VERDICTS = {"APPROVED": " (approved)", "CHANGES_REQUESTED": " (requested changes)"}
NOBODY = "ghost"
"""The login that GitHub shows for deleted accounts."""


def number_in(item: Json) -> object:
    return item["number"]


def external_id(repository: int, number: int) -> str:
    return f"{repository}/{number}"


def wiki_prefix(repository: int) -> str:
    """Return the beginning of the external ids of the pages of a repository's wiki."""
    return f"{repository}/wiki/"


def split_wiki_id(id: str) -> tuple[int, str] | None:
    """Return the number of the repository and git's id of a page; None: the id is not one of a page."""
    repository, _, page = id.partition("/wiki/")
    if not page or not (repository.isascii() and repository.isdecimal() and len(repository) < 16):
        return None
    return int(repository), page


def split_id(id: str) -> tuple[int, int] | None:
    """Return the numbers of the repository and of the document; None: the id is not one of ours."""
    repository, _, number = id.partition("/")
    if not all(part.isascii() and part.isdecimal() and len(part) < 16 for part in (repository, number)):
        return None
    return int(repository), int(number)


def tag(repository: int) -> str:
    """Return the tag whose holders are the collaborators of a repository."""
    return f"repository:{repository}"


def organization_tag(id: int) -> str:
    return f"organization:{id}"


def acl_tags(repository: Repository, public: Collection[str]) -> tuple[str, ...]:
    """Return the tags of a repository's documents; ``public`` are those of the settings for public repositories."""
    own = tag(repository.id)
    if repository.visibility == "PUBLIC":
        return (own, *public)
    if repository.visibility == "INTERNAL" and repository.organization_id is not None:
        return (own, organization_tag(repository.organization_id))
    return (own,)


def revision(repository: Repository, item: Json) -> str:
    """Return the revision of a document. GitHub does not say what changes ``updatedAt``; it is known not to change when
    a label or milestone is renamed. Therefore their names count, too, and the number of comments and reviews and the
    time of the comment that was edited last."""
    newest = item["newest"]
    state = [
        repository.name,
        item["updatedAt"],
        sorted(_names(item)),
        (item.get("milestone") or {}).get("title"),
        newest["totalCount"],
        [comment["updatedAt"] for comment in nodes(newest)],
        (item.get("allReviews") or {}).get("totalCount"),
        (item.get("category") or {}).get("name"),
        item.get("isAnswered"),
    ]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]


def listed(repository: Repository, item: Json, public: Collection[str]) -> Listed:
    return Listed(
        external_id=external_id(repository.id, int(item["number"])),
        acl_tags=acl_tags(repository, public),
        revision=revision(repository, item),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    at: str
    """When it was said; ISO 8601 in UTC, as GitHub writes it."""
    login: str
    role: str
    """An act of the person, such as `` (approved)``; may be empty."""
    text: str
    changed_at: str

    @classmethod
    def of(cls, said: Json, role: str = "", at: str | None = None) -> _Part:
        login = (said.get("author") or {}).get("login") or NOBODY
        at = at or said["createdAt"]
        return cls(at, login, role, clean(said.get("body") or ""), said.get("lastEditedAt") or at)


def clean(text: str) -> str:
    """Clean a text. The separator of messages is removed, so that a text cannot forge a message, and lone surrogates
    are replaced."""
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace(RECORD_SEPARATOR, " ").replace("\r\n", "\n").strip()


def document(kind: Kind, repository: Repository, item: Json, public: Collection[str]) -> Document | Unreadable:
    """Convert a document with all of its comments (``queries.complete``). Hidden comments and reviews that were not
    submitted are left out."""
    first, parts = _Part.of(item), _parts(kind, item)
    texts = [f"{first.login}: {first.text}" if first.text else f"{first.login} opened this {SINGULAR[kind]}."]
    texts += [f"{part.login}{part.role}: {part.text}" for part in parts]
    content = RECORD_SEPARATOR.join(texts)
    id, tags = external_id(repository.id, int(item["number"])), acl_tags(repository, public)
    if len(content.encode()) > MAX_CONTENT_BYTES:
        return too_large(kind, repository, item, public)
    labels, milestone = _names(item), (item.get("milestone") or {}).get("title")
    return Document(
        external_id=id,
        title=f"{' '.join(clean(item['title']).split())} · {repository.name}#{item['number']}",
        content=content,
        media_type=MESSAGES_TYPE,
        acl_tags=tags,
        revision=revision(repository, item),
        source_url=item["url"],
        author=first.login,
        source_modified_at=datetime.fromisoformat(max(part.changed_at for part in (first, *parts))),
        metadata={
            "kind": SINGULAR[kind],
            "repository": repository.name,
            "number": item["number"],
            "state": _state(kind, item),
            "comments": len(parts),
            **({"labels": [*labels]} if labels else {}),
            **({"milestone": milestone} if milestone else {}),
            **({"category": item["category"]["name"], "answered": bool(item["isAnswered"])} if _asks(item) else {}),
        },
    )


def too_large(kind: Kind, repository: Repository, item: Json, public: Collection[str]) -> Unreadable:
    """Return the entry for a document that no message can hold."""
    return Unreadable(
        external_id=external_id(repository.id, int(item["number"])),
        code="too_large",
        message=f"the {SINGULAR[kind]} with its comments is larger than 4 MiB: continue in a new one",
        acl_tags=acl_tags(repository, public),
        revision=revision(repository, item),
    )


def _parts(kind: Kind, item: Json) -> list[_Part]:
    """Return the visible comments and reviews in the order of time; a discussion's replies follow their comment."""
    if kind == "discussions":
        return [
            _Part.of(said, " (answer)" if said["isAnswer"] else "")
            for comment in nodes(item["comments"])
            for said in (comment, *nodes(comment["replies"]))
            if _is_visible(said)
        ]
    parts = [_Part.of(comment) for comment in nodes(item["comments"]) if _is_visible(comment)]
    for review in nodes(item.get("reviews")):
        if review["state"] == "PENDING":
            continue
        if _is_visible(review):
            parts.append(_Part.of(review, _VERDICTS.get(review["state"], ""), review["submittedAt"]))
        comments = [comment for comment in nodes(review["comments"]) if _is_visible(comment)]
        # They were written before, and nobody saw them until the review was submitted.
        parts += [_Part.of(comment, f" on {' '.join(clean(comment['path']).split())}") for comment in comments]
    return sorted(parts, key=lambda part: part.at)


def _is_visible(said: Json) -> bool:
    return not said["isMinimized"] and not said.get("deletedAt") and bool((said.get("body") or "").strip())


def _names(item: Json) -> Sequence[str]:
    return [str(label["name"]) for label in nodes(item.get("labels"))]


def _asks(item: Json) -> bool:
    return item.get("category") is not None


def _state(kind: Kind, item: Json) -> str:
    if kind == "issues":
        return str(item["issueState"]).lower()
    if kind == "discussions":
        return "closed" if item["closed"] else "open"
    state = str(item["pullRequestState"]).lower()
    return "draft" if state == "open" and item["isDraft"] else state
