"""Projects, issues, comments and holders of permissions, parsed from the JSON of either flavour. Pure.

Parsing functions raise KeyError, TypeError or ValueError where a required part is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from connectors.atlassian import Person
from connectors.errors import BadData

Json = Mapping[str, Any]


def person(json: Json) -> Person:
    return Person(
        id=str(json.get("accountId") or json.get("key") or ""),
        name=str(json.get("displayName") or ""),
        username=str(json.get("name") or ""),
        email=str(json.get("emailAddress") or ""),
    )


def is_reader(json: Json) -> bool:
    """False for accounts that cannot log in to Jira: inactive ones, apps, and customers of a portal."""
    return json.get("active") is not False and json.get("accountType") in (None, "atlassian")


_TYPES_WITHOUT_CUSTOMERS = frozenset({"software", "business", "product_discovery"})


@dataclass(frozen=True, slots=True)
class Project:
    id: str
    key: str
    name: str
    is_service_desk: bool = False
    """True where comments may be internal: in a service project, and where the type is not known."""
    lead: str = ""
    """The id of its lead."""


def project(json: Json) -> Project:
    lead = json.get("lead")
    return Project(
        id=str(int(json["id"])),
        key=str(json["key"]),
        name=str(json.get("name") or json["key"]),
        is_service_desk=json.get("projectTypeKey") not in _TYPES_WITHOUT_CUSTOMERS,
        lead=person(lead).id if isinstance(lead, Mapping) else "",
    )


# Holders of permissions


@dataclass(frozen=True, slots=True)
class Holders:
    """The holders of a permission or the members of a security level."""

    users: frozenset[str] = frozenset()
    """Account ids (Cloud) or user keys (Data Center)."""
    groups: frozenset[str] = frozenset()
    """Group ids (Cloud) or names (Data Center)."""
    roles: frozenset[str] = frozenset()
    """Ids of project roles."""
    applications: frozenset[str] = frozenset()
    """Keys of products, whose users hold it; an empty key stands for the users of any product."""
    fields: frozenset[str] = frozenset()
    """Fields of the issue whose people or groups hold it: ``reporter``, ``assignee``, ``customfield_…``."""
    has_lead: bool = False
    has_anyone: bool = False
    """Whether everybody holds it without logging in."""
    unknown: frozenset[str] = frozenset()
    """Types of holders that this version does not know: they admit nobody."""


def holders(entries: Iterable[Json]) -> Holders:
    """Parse the ``holder`` objects of a permission scheme or a security level. ``sd.customer.portal.only`` gives access
    to the customer portal and not to Jira, and so admits nobody here."""
    named: dict[str, set[str]] = {kind: set() for kind in ("users", "groups", "roles", "applications", "fields")}
    unknown: set[str] = set()
    has_lead = has_anyone = False
    for entry in entries:
        kind, name = str(entry.get("type")), _holder_name(entry)
        match kind:
            case "user" if name:
                named["users"].add(name)
            case "group" if name:
                named["groups"].add(name)
            case "projectRole" if name:
                named["roles"].add(str(int(name)))
            case "applicationRole":
                named["applications"].add(name)
            case "reporter" | "assignee":
                named["fields"].add(kind)
            case "userCustomField" | "groupCustomField" if name:
                named["fields"].add(name)
            case "projectLead":
                has_lead = True
            case "anyone":
                has_anyone = True
            case "sd.customer.portal.only":
                pass
            case _:
                unknown.add(kind if kind.isprintable() else "?")
    return Holders(
        **{kind: frozenset(names) for kind, names in named.items()},
        has_lead=has_lead,
        has_anyone=has_anyone,
        unknown=frozenset(unknown),
    )


def _holder_name(entry: Json) -> str:
    """Return the id of a holder. ``value`` stays the same when a group is renamed, which ``parameter`` does not."""
    user = entry.get("user")
    nested = user.get("accountId") or user.get("key") if isinstance(user, Mapping) else None
    return str(nested or entry.get("value") or entry.get("parameter") or "")


@dataclass(frozen=True, slots=True)
class Rules:
    """The permissions of one project that decide who may read its issues."""

    browse: Holders = Holders()
    """Browse Projects."""
    agents: Holders = Holders()
    """Service Project Agent: may read internal comments."""
    levels: Mapping[str, Holders] = field(default_factory=dict)
    """The members of each security level, by its id. Data Center does not show them."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """The ids of the project's roles by name."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """The reasons why parts could not be read, by part: until then nobody holds them."""
    unreadable: BadData | None = None
    """Why ``browse`` and ``agents`` are empty, if their data could not be read."""


# Issues


@dataclass(frozen=True, slots=True)
class Comment:
    id: str
    author: str
    """A display name."""
    body: Any
    """A document of ADF (Cloud), or wiki markup (Data Center)."""
    rendered: str | None
    """Data Center: the body as HTML."""
    updated: str
    visibility: Json | None
    """To whom its author restricted it; None: to nobody."""
    is_public: bool | None
    """Jira Service Management: whether customers may see it; None: Jira does not say."""


def comment(json: Json, rendered: str | None = None) -> Comment:
    author = json.get("author")
    visibility = json.get("visibility")
    return Comment(
        id=str(json["id"]),
        author=person(author).name if isinstance(author, Mapping) else "",
        body=json.get("body"),
        rendered=str(json["renderedBody"]) if json.get("renderedBody") else rendered,
        updated=str(json.get("updated") or json["created"]),
        visibility=visibility if isinstance(visibility, Mapping) and visibility else None if not visibility else {},
        is_public=_is_public(json),
    )


def _is_public(json: Json) -> bool | None:
    shown = json.get("jsdPublic")
    return shown if isinstance(shown, bool) else None


@dataclass(frozen=True, slots=True)
class Attachment:
    id: str
    name: str
    size: int
    media_type: str
    created: str
    author: str
    """A display name."""


def attachment(json: Json) -> Attachment:
    author = json.get("author")
    return Attachment(
        id=str(int(json["id"])),
        name=str(json["filename"]),
        size=int(json.get("size") or 0),
        media_type=str(json.get("mimeType") or ""),
        created=str(json["created"]),
        author=person(author).name if isinstance(author, Mapping) else "",
    )


@dataclass(frozen=True, slots=True)
class Issue:
    id: str
    key: str
    project: str
    """The id of its project."""
    updated: str
    fields: Json
    rendered: Json
    """Data Center: fields as HTML."""
    comments: Sequence[Comment] = ()
    attachments: Sequence[Attachment] = ()
    comments_total: int = 0
    """The number of comments that the account may see; a response about several issues may hold fewer."""

    @property
    def level(self) -> str | None:
        """The id of its security level; None: it has none."""
        level = self.fields.get("security")
        return None if level is None else str(int(level["id"]))

    @property
    def restriction(self) -> frozenset[str] | None:
        """The ids of the roles to which it is restricted (team-managed projects); empty: it is not restricted; None:
        it is restricted in a way that this version does not know."""
        field = self.fields.get("issuerestriction")
        restrictions = field.get("issuerestrictions") if isinstance(field, Mapping) else field
        if not restrictions:
            return frozenset()
        if not isinstance(restrictions, Mapping) or restrictions.keys() != {"projectrole"}:
            return None
        roles = restrictions["projectrole"]
        ids = [role.get("id", role.get("value")) if isinstance(role, Mapping) else role for role in _list(roles)]
        return frozenset(map(str, ids)) if ids and all(str(id).isdecimal() for id in ids) else None

    @property
    def is_archived(self) -> bool:
        return bool(self.fields.get("archiveddate"))

    def names(self, field: str) -> list[str]:
        """Return the names of one or several things, such as of a status or of components."""
        return [name for value in _list(self.fields.get(field)) if (name := _name(value))]

    def name(self, field: str) -> str:
        return next(iter(self.names(field)), "")

    def people(self, field: str) -> list[Person]:
        """Return the people in a field of one or several people who can log in to Jira."""
        return [person(value) for value in self._entries(field) if "displayName" in value and is_reader(value)]

    def groups(self, field: str) -> list[str]:
        """Return the ids (Cloud) or names (Data Center) of the groups in a field."""
        groups = (value for value in self._entries(field) if "displayName" not in value)
        return [str(name) for value in groups if (name := value.get("groupId") or value.get("name"))]

    def _entries(self, field: str) -> list[Json]:
        return [value for value in _list(self.fields.get(field)) if isinstance(value, Mapping)]


def issue(json: Json) -> Issue:
    fields = json["fields"]
    rendered = json.get("renderedFields")
    rendered = rendered if isinstance(rendered, Mapping) else {}
    shown = fields.get("comment") or {}
    bodies = {str(entry.get("id")): entry.get("body") for entry in (rendered.get("comment") or {}).get("comments", ())}
    comments = tuple(comment(entry, bodies.get(str(entry["id"]))) for entry in shown.get("comments", ()))
    parsed = Issue(
        id=str(int(json["id"])),
        key=str(json["key"]),
        project=str(int(fields["project"]["id"])),
        updated=str(fields["updated"]),
        fields=fields,
        rendered=rendered,
        comments=comments,
        attachments=tuple(attachment(entry) for entry in fields.get("attachment") or ()),
        comments_total=max(int(shown.get("total") or 0), len(comments)),
    )
    parse_time(parsed.updated)
    _ = parsed.level  # an unreadable level is an error, and not none
    return parsed


def parse_time(text: str) -> datetime:
    """Parse a time such as ``2026-05-23T14:47:28.592+0000``. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("a time has no zone")
    return moment


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _name(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("displayName") or value.get("name") or value.get("value") or value.get("key")
    return str(value or "")
