"""Content as the two REST APIs show it.

v1: https://developer.atlassian.com/cloud/confluence/rest/v1/intro (Cloud), and Data Center's of the same shape; v2:
https://developer.atlassian.com/cloud/confluence/rest/v2/intro. tests/contract/connectors/confluence/test_shapes.py
pins them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from connectors.fakes.confluence_state import Item, Restriction, Space, State, User

Json = dict[str, Any]
Expand = dict[str, "Expand"]
CHILDREN = 25
"""How many an expanded listing within another answer holds."""
RESTRICTED = 200


def iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def expansions(text: str) -> Expand:
    """``a.b,c`` → {a: {b: {}}, c: {}}"""
    tree: Expand = {}
    for path in filter(None, text.split(",")):
        node = tree
        for part in path.split("."):
            node = node.setdefault(part.strip(), {})
    return tree


def listed(results: list[Json], *, start: int, limit: int, next_link: str | None = None) -> Json:
    links: Json = {"self": "/rest/api", "base": "", "context": ""}
    if next_link:
        links["next"] = next_link
    return {"results": results, "start": start, "limit": limit, "size": len(results), "_links": links}


class V1:
    def __init__(self, state: State, *, cloud: bool, base: str) -> None:
        self.state, self.cloud, self.base = state, cloud, base

    def user(self, user: User) -> Json:
        if not self.cloud:
            return {
                "type": "known",
                "username": user.username,
                "userKey": user.account_id,
                "displayName": user.display,
                "profilePicture": {"path": "/images/icons/profilepics/default.svg", "width": 48, "height": 48},
                "_links": {"self": f"{self.base}/rest/api/user?key={quote(user.account_id)}"},
                "_expandable": {"status": ""},
            }
        return {
            "type": "known",
            "accountId": user.account_id,
            "accountType": "atlassian",
            "email": user.email if user.shows_email else "",
            "publicName": user.display,
            "displayName": user.display,
            "timeZone": user.time_zone,
            "isExternalCollaborator": False,
            "_links": {},
        }

    def group(self, id_: str) -> Json:
        if self.cloud:
            return {"type": "group", "name": id_.removeprefix("id-"), "id": id_, "_links": {}}
        return {"type": "group", "name": id_, "_links": {"self": f"{self.base}/rest/api/group/{quote(id_)}"}}

    def content(self, item: Item, expand: Expand) -> Json:
        space = self.state.spaces[item.space]
        webui = f"/spaces/{item.space}/pages/{item.id}" if self.cloud else f"/pages/viewpage.action?pageId={item.id}"
        shown: Json = {"id": item.id, "type": item.kind, "status": item.status, "title": item.title}
        links = {"webui": webui, "self": f"{self.base}/rest/api/content/{item.id}", "tinyui": f"/x/{item.id}"}
        if item.kind == "attachment":
            links["download"] = f"/download/attachments/{item.container}/{quote(item.title)}?version={item.number}"
            shown["metadata"] = {"mediaType": item.media_type}
        shown["extensions"] = self._extensions(item)
        parts: dict[str, Callable[[Expand], Any]] = {
            "space": lambda deeper: self.space(space),
            "version": lambda deeper: self.version(item),
            "history": lambda deeper: self._history(item),
            "body": lambda deeper: {
                name: {"value": item.body, "representation": "storage"} for name in deeper if name == "storage"
            },
            "ancestors": lambda deeper: [self.content(one, deeper) for one in self._ancestors(item)],
            "container": lambda deeper: (
                self.content(self.state.items[item.container], deeper) if item.container else self.space(space)
            ),
            "restrictions": lambda deeper: self.restrictions(item, deeper),
            "children": lambda deeper: self._below(item, deeper, "child"),
            "descendants": lambda deeper: self._below(item, deeper, "descendant"),
        }
        for name, make in parts.items():
            if name in expand:
                shown[name] = make(expand[name])
        shown["_expandable"] = {
            name: f"/rest/api/content/{item.id}?expand={name}" for name in parts if name not in expand
        }
        shown["_links"] = links
        return shown

    def _ancestors(self, item: Item) -> list[Item]:
        """v1 knows no folders: it leaves them out, as if they were not there."""
        if item.kind == "comment":
            found: list[Item] = []
            above = item.parent
            while above:
                found.insert(0, self.state.items[above])
                above = self.state.items[above].parent
            return found
        return [] if item.container else [one for one in self.state.chain(item)[:-1] if one.kind == "page"]

    def _extensions(self, item: Item) -> Json:
        if item.kind == "attachment":
            return {"mediaType": item.media_type, "fileSize": len(item.data), "comment": ""}
        if item.kind != "comment":
            return {"position": "none"}
        if item.selection is None:
            return {"location": "footer", "_expandable": {"resolution": ""}}
        return {
            "location": "inline",
            "resolution": {"status": "open"},
            "inlineProperties": {"originalSelection": item.selection, "markerRef": f"m-{item.id}"},
        }

    def _below(self, item: Item, expand: Expand, how: str) -> Json:
        shown: Json = {}
        for name in expand:
            found = self.below(item, name, deep=how == "descendant")
            more = f"/rest/api/content/{item.id}/{how}/{name}?start={CHILDREN}" if len(found) > CHILDREN else None
            first = [self.content(one, expand[name]) for one in found[:CHILDREN]]
            shown[name] = listed(first, start=0, limit=CHILDREN, next_link=more)
        return shown

    def below(self, item: Item, kind: str, *, deep: bool) -> list[Item]:
        if kind == "attachment":
            return self.state.of(item.id, "attachment")
        return [one for one in self.state.of(item.id, "comment") if deep or one.parent is None]

    def version(self, item: Item) -> Json:
        return {
            "by": self.user(self.state.users[item.author]),
            "when": iso(item.versions[-1]),
            "number": item.number,
            "message": "",
            "minorEdit": False,
            "_expandable": {"content": ""},
            "_links": {},
        }

    def _history(self, item: Item) -> Json:
        return {
            "latest": True,
            "createdBy": self.user(self.state.users[item.author]),
            "createdDate": iso(item.versions[0]),
            "_links": {},
        }

    def space(self, space: Space) -> Json:
        return {
            "id": int(space.id),
            "key": space.key,
            "name": space.name,
            "type": space.type,
            "status": "current",
            "_links": {"webui": f"/display/{space.key}", "self": f"{self.base}/rest/api/space/{space.key}"},
        }

    def restrictions(self, item: Item, expand: Expand) -> Json:
        """Only the page's own; nothing here tells what its ancestors add."""
        shown: Json = {}
        for operation in ("read", "update"):
            if operation in expand:
                shown[operation] = self.restriction(item, operation, expand[operation].get("restrictions", {}))
        return shown

    def restriction(
        self, item: Item, operation: str, expand: Expand, *, start: int = 0, limit: int = RESTRICTED
    ) -> Json:
        allowed: Restriction = getattr(item, operation)
        who: Json = {}
        if "user" in expand:
            users = [self.user(self.state.users[one]) for one in sorted(allowed.users)]
            who["user"] = self._some(users, start, limit)
        if "group" in expand:
            who["group"] = self._some([self.group(one) for one in sorted(allowed.groups)], start, limit)
        who["_expandable"] = {name: "" for name in ("user", "group") if name not in expand}
        links = {"self": f"{self.base}/rest/api/content/{item.id}/restriction/byOperation/{operation}"}
        return {"operation": operation, "restrictions": who, "_expandable": {"content": ""}, "_links": links}

    def _some(self, found: list[Json], start: int, limit: int) -> Json:
        return {
            "results": found[start : start + limit],
            "start": start,
            "limit": limit,
            "size": len(found[start:][:limit]),
        }


class V2:
    def __init__(self, state: State) -> None:
        self.state = state

    def _common(self, item: Item, body: bool) -> Json:
        version = {
            "createdAt": iso(item.versions[-1]),
            "message": "",
            "number": item.number,
            "minorEdit": False,
            "authorId": item.author,
        }
        return {
            "id": item.id,
            "status": item.status,
            "title": item.title,
            "version": version,
            "body": {"storage": {"representation": "storage", "value": item.body}} if body else {},
        }

    def page(self, item: Item, body: bool) -> Json:
        shown = self._common(item, body) | {
            "spaceId": self.state.spaces[item.space].id,
            "authorId": item.author,
            "createdAt": iso(item.versions[0]),
            "_links": {
                "webui": f"/spaces/{item.space}/pages/{item.id}",
                "editui": f"/pages/resumedraft.action?draftId={item.id}",
                "tinyui": f"/x/{item.id}",
            },
        }
        if item.kind == "page":
            parent = self.state.items[item.parent] if item.parent else None
            shown |= {
                "parentId": item.parent,
                "parentType": parent.kind if parent else None,
                "position": 0,
                "ownerId": item.author,
                "lastOwnerId": None,
            }
        return shown

    def comment(self, item: Item, body: bool) -> Json:
        container = self.state.items[item.container or ""]
        shown = self._common(item, body) | {"_links": {"webui": f"/spaces/{item.space}/pages/{container.id}"}}
        if item.parent:
            shown["parentCommentId"] = item.parent
        else:
            shown["pageId" if container.kind == "page" else "blogPostId"] = container.id
        if item.selection is not None:
            shown["resolutionStatus"] = "open"
            shown["properties"] = {
                "inlineMarkerRef": f"m-{item.id}",
                "inlineOriginalSelection": item.selection,
            }
        return shown

    def attachment(self, item: Item) -> Json:
        container = self.state.items[item.container or ""]
        shown = self._common(item, False)
        del shown["body"]
        link = f"/download/attachments/{container.id}/{quote(item.title)}?version={item.number}"
        return shown | {
            "createdAt": iso(item.versions[0]),
            "mediaType": item.media_type,
            "mediaTypeDescription": "File",
            "comment": "",
            "fileId": f"f-{item.id}",
            "fileSize": len(item.data),
            "pageId" if container.kind == "page" else "blogPostId": container.id,
            "webuiLink": f"/pages/viewpageattachments.action?pageId={container.id}",
            "downloadLink": link,
            "_links": {"webui": f"/pages/viewpageattachments.action?pageId={container.id}", "download": link},
        }

    def space(self, space: Space) -> Json:
        return {
            "id": space.id,
            "key": space.key,
            "name": space.name,
            "type": space.type,
            "status": "current",
            "authorId": next(iter(self.state.users)),
            "createdAt": iso(datetime(2024, 1, 1, tzinfo=UTC)),
            "homepageId": None,
            "description": None,
            "icon": None,
            "_links": {"webui": f"/spaces/{space.key}"},
        }

    def permissions(self, space: Space) -> list[Json]:
        who = [("user", one) for one in sorted(space.readers.users)]
        who += [("group", one) for one in sorted(space.readers.groups)]
        return [
            {
                "id": f"{space.id}{n}{key}",
                "principal": {"type": kind, "id": one},
                "operation": {"key": key, "targetType": target},
            }
            for n, (kind, one) in enumerate(who)
            for key, target in (("read", "space"), ("create", "page"))
        ]

    def user(self, user: User) -> Json:
        return {
            "displayName": user.display,
            "timeZone": user.time_zone,
            "personalSpaceId": None,
            "isExternalCollaborator": False,
            "accountStatus": "active",
            "accountId": user.account_id,
            "email": user.email if user.shows_email else None,
            "accountType": "atlassian",
            "publicName": user.display,
            "profilePicture": {"path": "", "isDefault": True},
        }
