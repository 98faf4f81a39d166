"""The GraphQL queries, and the repositories and pages that they return.

docs.github.com/graphql/reference. A query may touch at most 500,000 nodes and take ten seconds; its cost is the number
of requests that its connections would need, divided by a hundred.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from connectors.github.client import Api, Json
from connectors.github.options import Kind
from connectors.listings import moved_on
from connectors.rows import size_of
from pipeline.core.errors import Retryable

CONNECTIONS: Mapping[Kind, str] = {
    "issues": "issues",
    "pull_requests": "pullRequests",
    "discussions": "discussions",
}
_TYPES: Mapping[Kind, str] = {"issues": "Issue", "pull_requests": "PullRequest", "discussions": "Discussion"}
Detail = Literal["Listed", "Read"]
"""The fields of a document to request: the ones of its revision, or all."""
Order = Literal["CREATED_AT", "UPDATED_AT"]
MAX_DOCUMENT_BYTES = 32 * 1024 * 1024
"""The most memory that the comments of one document take: a text of 4 MiB takes up to four times as much. GitHub allows
2,500 comments of 64 kB."""
PROBED_UPDATES = 10
"""The newest documents of each kind that one request shows for many repositories."""
PROBED_REPOSITORIES = 20
"""The repositories of such a request."""

_PAGE = "pageInfo { hasNextPage endCursor }"
_REPOSITORY = """
fragment Place on Repository {
  id databaseId nameWithOwner visibility isDisabled hasDiscussionsEnabled hasWikiEnabled
  owner { __typename login ... on Organization { databaseId } }
}
"""
_COMMENT = """
fragment Said on Comment { author { login } body createdAt lastEditedAt }
"""
_STATE = """
fragment IssueListed on Issue {
  number updatedAt labels(first: 50) { nodes { name } } milestone { title }
  newest: comments(first: 1, orderBy: {field: UPDATED_AT, direction: DESC}) { totalCount nodes { updatedAt } }
}
fragment PullRequestListed on PullRequest {
  number updatedAt labels(first: 50) { nodes { name } } milestone { title }
  newest: comments(first: 1, orderBy: {field: UPDATED_AT, direction: DESC}) { totalCount nodes { updatedAt } }
  allReviews: reviews(first: 1) { totalCount }
}
fragment DiscussionListed on Discussion {
  number updatedAt labels(first: 50) { nodes { name } } category { name } isAnswered
  newest: comments(first: 1) { totalCount }
}
"""
COMMENTS = f"comments(first: 100, after: $after) {{ {_PAGE} nodes {{ id isMinimized ...Said }} }}"
REVIEWS = f"""reviews(first: 20, after: $after) {{ {_PAGE} nodes {{
    id state isMinimized submittedAt ...Said
    comments(first: 50) {{ {_PAGE} nodes {{ id path isMinimized ...Said }} }}
  }} }}"""
REVIEW_COMMENTS = f"comments(first: 100, after: $after) {{ {_PAGE} nodes {{ id path isMinimized ...Said }} }}"
DISCUSSION_COMMENTS = f"""comments(first: 25, after: $after) {{ {_PAGE} nodes {{
    id isMinimized isAnswer deletedAt ...Said
    replies(first: 25) {{ {_PAGE} nodes {{ id isMinimized isAnswer deletedAt ...Said }} }}
  }} }}"""
REPLIES = f"replies(first: 100, after: $after) {{ {_PAGE} nodes {{ id isMinimized isAnswer deletedAt ...Said }} }}"


def _first(connection: str) -> str:
    return connection.replace(", after: $after", "")


_READ = f"""
fragment IssueRead on Issue {{
  ...IssueListed ...Said id title url issueState: state {_first(COMMENTS)}
}}
fragment PullRequestRead on PullRequest {{
  ...PullRequestListed ...Said id title url isDraft pullRequestState: state {_first(COMMENTS)} {_first(REVIEWS)}
}}
fragment DiscussionRead on Discussion {{
  ...DiscussionListed ...Said id title url closed {_first(DISCUSSION_COMMENTS)}
}}
"""
_ALL = _STATE + _COMMENT + _READ


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository as GitHub shows it now."""

    id: int
    """The number that no rename and no transfer changes."""
    node: str
    """The id by which GraphQL finds it."""
    name: str
    """``owner/name``."""
    visibility: str
    """``PRIVATE``, ``INTERNAL`` or ``PUBLIC``."""
    organization: str | None
    """The login of the organisation that owns it; None: a person owns it."""
    organization_id: int | None
    has_discussions: bool
    has_wiki: bool
    """Whether its wiki is turned on. It exists only once it has a page, which GraphQL does not say."""
    is_disabled: bool
    """GitHub's staff disabled it: nobody reads it."""

    @classmethod
    def of(cls, json: Json) -> Repository:
        owner = json["owner"]
        is_organization = owner.get("__typename") == "Organization"
        return cls(
            id=int(json["databaseId"]),
            node=str(json["id"]),
            name=str(json["nameWithOwner"]),
            visibility=str(json["visibility"]),
            organization=str(owner["login"]) if is_organization else None,
            organization_id=owner.get("databaseId") if is_organization else None,
            has_discussions=bool(json["hasDiscussionsEnabled"]),
            has_wiki=bool(json["hasWikiEnabled"]),
            is_disabled=bool(json["isDisabled"]),
        )


def nodes(connection: Any) -> list[Json]:
    """Return the nodes of a connection, without those that the credential may not see."""
    rows = (connection or {}).get("nodes") or []
    return [row for row in rows if row is not None]


def following(connection: Any, after: str | None = None) -> str | None:
    """Return the cursor of the next page, or None. after: the cursor of this one. Raises Retryable where it is the
    same."""
    page = (connection or {}).get("pageInfo") or {}
    return moved_on(str(page["endCursor"]), after, "GitHub") if page.get("hasNextPage") else None


async def repositories_of(api: Api, owner: str) -> AsyncIterator[list[Repository]]:
    """Yield pages of the repositories of an owner that the credential sees; nothing if there is no such owner."""
    text = (
        "query($owner: String!, $after: String) { repositoryOwner(login: $owner) {"
        f" repositories(first: 100, after: $after, ownerAffiliations: [OWNER]) {{ {_PAGE} nodes {{ ...Place }} }}"
        " } }" + _REPOSITORY
    )
    after: str | None = None
    while True:
        data, _ = await api.query(text, {"owner": owner, "after": after})
        matches = (data.get("repositoryOwner") or {}).get("repositories")
        yield [Repository.of(json) for json in nodes(matches)]
        if (after := following(matches, after)) is None:
            return


async def repository_named(api: Api, name: str) -> Repository | None:
    """Return the repository of this present or former name; None: the credential sees none."""
    text = (
        "query($owner: String!, $name: String!) { repository(owner: $owner, name: $name, followRenames: true)"
        " { ...Place } }" + _REPOSITORY
    )
    owner, _, short = name.partition("/")
    data, _ = await api.query(text, {"owner": owner, "name": short})
    return None if data.get("repository") is None else Repository.of(data["repository"])


async def repository(api: Api, node: str) -> Repository | None:
    """Return a repository as it is now; None: the credential does not see it."""
    text = "query($id: ID!) { node(id: $id) { ... on Repository { ...Place } } }" + _REPOSITORY
    data, _ = await api.query(text, {"id": node})
    return Repository.of(data["node"]) if data.get("node") else None


async def documents(
    api: Api, repository: Repository, kind: Kind, detail: Detail, size: int, after: str | None, order: Order
) -> tuple[Repository, list[Json], str | None] | None:
    """Return a page of a repository's documents, with the repository as it is now and the cursor of the next page;
    None: the credential no longer sees the repository. By CREATED_AT the oldest come first, by UPDATED_AT the newest.
    Raises CursorExpired."""
    direction = "ASC" if order == "CREATED_AT" else "DESC"
    text = (
        "query($id: ID!, $first: Int!, $after: String) { node(id: $id) { ... on Repository { ...Place"
        f" {CONNECTIONS[kind]}(first: $first, after: $after, orderBy: {{field: {order}, direction: {direction}}})"
        f" {{ {_PAGE} nodes {{ ...{_TYPES[kind]}{detail} }} }} }} }} }}" + _fragments(kind, detail) + _REPOSITORY
    )
    data, _ = await api.query(text, {"id": repository.node, "first": size, "after": after})
    if not data.get("node"):
        return None
    page = data["node"][CONNECTIONS[kind]]
    return Repository.of(data["node"]), nodes(page), following(page, after)


def _fragments(kind: Kind, detail: Detail) -> str:
    """Return the definitions of the fragments that a query of one kind uses: GraphQL refuses unused ones."""
    name = _TYPES[kind]
    expected = {f"{name}Listed"} | ({f"{name}Read", "Said"} if detail == "Read" else set())
    parts = [part for part in _ALL.replace("\nfragment ", "\x00fragment ").split("\x00") if part.strip()]
    return "\n" + "\n".join(part for part in parts if part.split()[1] in expected)


async def numbered(
    api: Api, node: str, numbers: Sequence[int]
) -> tuple[Repository, Mapping[int, tuple[Kind, Json]]] | None:
    """Return the documents of these numbers that exist, with their repository; None: the credential does not see the
    repository."""
    requested = " ".join(
        f"n{n}: issueOrPullRequest(number: {n}) {{ __typename ...IssueRead ...PullRequestRead }}"
        f" d{n}: discussion(number: {n}) {{ ...DiscussionRead }}"
        for n in numbers
    )
    text = f"query($id: ID!) {{ node(id: $id) {{ ... on Repository {{ ...Place {requested} }} }} }}{_ALL}{_REPOSITORY}"
    data, _ = await api.query(text, {"id": node})
    if not data.get("node"):
        return None
    place, matches = data["node"], dict[int, tuple[Kind, Json]]()
    for n in numbers:
        if place.get(f"d{n}"):  # an issue that was made a discussion has the same number
            matches[n] = "discussions", place[f"d{n}"]
        elif item := place.get(f"n{n}"):
            matches[n] = "issues" if item["__typename"] == "Issue" else "pull_requests", item
    return Repository.of(place), matches


async def updates(api: Api, repositories: Sequence[Repository]) -> Mapping[int, Mapping[Kind, list[Json]]]:
    """Return the PROBED_UPDATES newest documents of each kind for at most PROBED_REPOSITORIES repositories."""
    fields = " ".join(
        f"{connection}(first: {PROBED_UPDATES}, orderBy: {{field: UPDATED_AT, direction: DESC}})"
        " { nodes { number updatedAt } }"
        for connection in CONNECTIONS.values()
    )
    text = f"query($ids: [ID!]!) {{ nodes(ids: $ids) {{ ... on Repository {{ databaseId {fields} }} }} }}"
    ids = [repository.node for repository in repositories]
    data, _ = await api.query(text, {"ids": ids}, tolerated=("NOT_FOUND", "FORBIDDEN"))
    return {
        int(json["databaseId"]): {kind: nodes(json[connection]) for kind, connection in CONNECTIONS.items()}
        for json in nodes(data)
        if json
    }


class TooMuchText(Exception):
    """No document can hold all comments."""


class _Room:
    """The memory that the comments of one document may still take."""

    def __init__(self) -> None:
        self._left = MAX_DOCUMENT_BYTES

    def take(self, rows: list[Json]) -> list[Json]:
        """Return the rows. Raises TooMuchText."""
        self._left -= size_of(rows, self._left)
        if self._left < 0:
            raise TooMuchText
        return rows


async def _rest(api: Api, id: str, type_: str, connection: str, first: Any, room: _Room) -> list[Json]:
    """Return all nodes of a connection of which ``first`` is the first page, which ``room`` holds already.
    ``connection`` uses ``$after``. Raises TooMuchText."""
    rows, after = nodes(first), following(first)
    name = connection.partition("(")[0]
    text = f"query($id: ID!, $after: String) {{ node(id: $id) {{ ... on {type_} {{ {connection} }} }} }}{_COMMENT}"
    while after is not None:
        data, _ = await api.query(text, {"id": id, "after": after})
        if not data.get("node"):  # it was deleted meanwhile: the next poll or sweep reads what is left
            raise Retryable("a document was deleted while it was read")
        page = data["node"][name]
        rows += room.take(nodes(page))
        after = following(page, after)
    return rows


async def complete(api: Api, kind: Kind, item: Json) -> Json:
    """Return a document with the comments that are not on their first page. Raises TooMuchText."""
    room = _Room()
    room.take([item])
    if kind == "discussions":
        comments = await _rest(api, item["id"], "Discussion", DISCUSSION_COMMENTS, item["comments"], room)
        for number, comment in enumerate(comments):
            replies = await _rest(api, comment["id"], "DiscussionComment", REPLIES, comment["replies"], room)
            comments[number] = {**comment, "replies": {"nodes": replies}}
        return {**item, "comments": {"nodes": comments}}
    type_ = _TYPES[kind]
    item = {**item, "comments": {"nodes": await _rest(api, item["id"], type_, COMMENTS, item["comments"], room)}}
    if kind == "issues":
        return item
    reviews = await _rest(api, item["id"], type_, REVIEWS, item["reviews"], room)
    for number, review in enumerate(reviews):
        comments = await _rest(api, review["id"], "PullRequestReview", REVIEW_COMMENTS, review["comments"], room)
        reviews[number] = {**review, "comments": {"nodes": comments}}
    return {**item, "reviews": {"nodes": reviews}}
