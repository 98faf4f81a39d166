"""Content as JSON of the two REST APIs.

v1: https://developer.atlassian.com/cloud/confluence/rest/v1/intro (Cloud; Data Center's has the same shape); v2:
https://developer.atlassian.com/cloud/confluence/rest/v2/intro. tests/contract/connectors/confluence/test_shapes.py
compares both with recorded responses.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from connectors.fakes.confluence_state import Item, Restriction, Space, State, User

Json = dict[str, Any]
Expand = dict[str, "Expand"]
MAX_EXPANDED_CHILDREN = 25
"""Entries of a listing that is expanded within another response."""
MAX_RESTRICTION_ENTRIES = 200


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


def results_page(results: list[Json], *, start: int, limit: int, next_link: str | None = None) -> Json:
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
        content: Json = {"id": item.id, "type": item.kind, "status": item.status, "title": item.title}
        links = {"webui": webui, "self": f"{self.base}/rest/api/content/{item.id}", "tinyui": f"/x/{item.id}"}
        if item.kind == "attachment":
            links["download"] = (
                f"/download/attachments/{item.container}/{quote(item.title)}?version={item.version_number}"
            )
            content["metadata"] = {"mediaType": item.media_type}
        content["extensions"] = self._extensions(item)
        parts: dict[str, Callable[[Expand], Any]] = {
            "space": lambda nested: self.space(space),
            "version": lambda nested: self.version(item),
            "history": lambda nested: self._history(item),
            "body": lambda nested: {
                name: {"value": item.body, "representation": "storage"} for name in nested if name == "storage"
            },
            "ancestors": lambda nested: [self.content(ancestor, nested) for ancestor in self._ancestors(item)],
            "container": lambda nested: (
                self.content(self.state.items[item.container], nested) if item.container else self.space(space)
            ),
            "restrictions": lambda nested: self.restrictions(item, nested),
            "children": lambda nested: self._child_listings(item, nested, "child"),
            "descendants": lambda nested: self._child_listings(item, nested, "descendant"),
        }
        for name, make in parts.items():
            if name in expand:
                content[name] = make(expand[name])
        if "labels" in expand.get("metadata", {}):
            content["metadata"] = {**content.get("metadata", {}), "labels": self._labels(item)}
        content["_expandable"] = {
            name: f"/rest/api/content/{item.id}?expand={name}" for name in parts if name not in expand
        }
        content["_links"] = links
        return content

    def _ancestors(self, item: Item) -> list[Item]:
        """Return an item's ancestors without folders, which v1 does not know and silently leaves out."""
        if item.kind == "comment":
            ancestors: list[Item] = []
            above = item.parent
            while above:
                ancestors.insert(0, self.state.items[above])
                above = self.state.items[above].parent
            return ancestors
        return (
            [] if item.container else [ancestor for ancestor in self.state.chain(item)[:-1] if ancestor.kind == "page"]
        )

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

    def _child_listings(self, item: Item, expand: Expand, relation: str) -> Json:
        listings: Json = {}
        for name in expand:
            items = self.children(item, name, deep=relation == "descendant")
            next_link = (
                f"/rest/api/content/{item.id}/{relation}/{name}?start={MAX_EXPANDED_CHILDREN}"
                if len(items) > MAX_EXPANDED_CHILDREN
                else None
            )
            first = [self.content(child, expand[name]) for child in items[:MAX_EXPANDED_CHILDREN]]
            listings[name] = results_page(first, start=0, limit=MAX_EXPANDED_CHILDREN, next_link=next_link)
        return listings

    def children(self, item: Item, kind: str, *, deep: bool) -> list[Item]:
        if kind == "attachment":
            return self.state.contained(item.id, "attachment")
        return [comment for comment in self.state.contained(item.id, "comment") if deep or comment.parent is None]

    def version(self, item: Item) -> Json:
        return {
            "by": self.user(self.state.users[item.author]),
            "when": iso(item.versions[-1]),
            "number": item.version_number,
            "message": "",
            "minorEdit": False,
            "_expandable": {"content": ""},
            "_links": {},
        }

    def _labels(self, item: Item) -> Json:
        labels = [("global", name) for name in sorted(item.labels)] + [("my", "favourite")]
        results = [{"prefix": prefix, "name": name, "id": name, "label": name} for prefix, name in labels]
        return {"results": results, "start": 0, "limit": 200, "size": len(results), "_links": {}}

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
            "status": space.status,
            "_links": {"webui": f"/display/{space.key}", "self": f"{self.base}/rest/api/space/{space.key}"},
        }

    def restrictions(self, item: Item, expand: Expand) -> Json:
        """Return only the page's own restrictions; those of its ancestors are not included."""
        restrictions: Json = {}
        for operation in ("read", "update"):
            if operation in expand:
                restrictions[operation] = self.restriction(item, operation, expand[operation].get("restrictions", {}))
        return restrictions

    def restriction(
        self, item: Item, operation: str, expand: Expand, *, start: int = 0, limit: int = MAX_RESTRICTION_ENTRIES
    ) -> Json:
        allowed: Restriction = getattr(item, operation)
        restrictions: Json = {}
        if "user" in expand:
            users = [self.user(self.state.users[id_]) for id_ in sorted(allowed.users)]
            restrictions["user"] = self._page(users, start, limit)
        if "group" in expand:
            restrictions["group"] = self._page([self.group(id_) for id_ in sorted(allowed.groups)], start, limit)
        restrictions["_expandable"] = {name: "" for name in ("user", "group") if name not in expand}
        links = {"self": f"{self.base}/rest/api/content/{item.id}/restriction/byOperation/{operation}"}
        return {"operation": operation, "restrictions": restrictions, "_expandable": {"content": ""}, "_links": links}

    def _page(self, rows: list[Json], start: int, limit: int) -> Json:
        return {
            "results": rows[start : start + limit],
            "start": start,
            "limit": limit,
            "size": len(rows[start:][:limit]),
        }


class V2:
    def __init__(self, state: State) -> None:
        self.state = state

    def _common(self, item: Item, body: bool) -> Json:
        version = {
            "createdAt": iso(item.versions[-1]),
            "message": "",
            "number": item.version_number,
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
        page = self._common(item, body) | {
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
            page |= {
                "parentId": item.parent,
                "parentType": parent.kind if parent else None,
                "position": 0,
                "ownerId": item.author,
                "lastOwnerId": None,
            }
        return page

    def comment(self, item: Item, body: bool) -> Json:
        container = self.state.items[item.container or ""]
        comment = self._common(item, body) | {"_links": {"webui": f"/spaces/{item.space}/pages/{container.id}"}}
        if item.parent:
            comment["parentCommentId"] = item.parent
        else:
            comment["pageId" if container.kind == "page" else "blogPostId"] = container.id
        if item.selection is not None:
            comment["resolutionStatus"] = "open"
            comment["properties"] = {
                "inlineMarkerRef": f"m-{item.id}",
                "inlineOriginalSelection": item.selection,
            }
        return comment

    def attachment(self, item: Item) -> Json:
        container = self.state.items[item.container or ""]
        attachment = self._common(item, False)
        del attachment["body"]
        link = f"/download/attachments/{container.id}/{quote(item.title)}?version={item.version_number}"
        return attachment | {
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
            "status": space.status,
            "authorId": next(iter(self.state.users)),
            "createdAt": iso(datetime(2024, 1, 1, tzinfo=UTC)),
            "homepageId": None,
            "description": None,
            "icon": None,
            "_links": {"webui": f"/spaces/{space.key}"},
        }

    def permissions(self, space: Space) -> list[Json]:
        readers = [("user", id_) for id_ in sorted(space.readers.users)]
        readers += [("group", id_) for id_ in sorted(space.readers.groups)]
        return [
            {
                "id": f"{space.id}{n}{key}",
                "principal": {"type": kind, "id": id_},
                "operation": {"key": key, "targetType": target},
            }
            for n, (kind, id_) in enumerate(readers)
            for key, target in (("read", "space"), ("create", "page"))
        ]

    def role(self, numbered: tuple[int, tuple[str, tuple[str, ...]]]) -> Json:
        _, (id_, permissions) = numbered
        return {
            "id": id_,
            "type": "SYSTEM",
            "name": id_.capitalize(),
            "description": f"The role {id_}",
            "spacePermissions": list(permissions),
        }

    def assignment(self, numbered: tuple[int, tuple[str, str, str]]) -> Json:
        _, (kind, id_, role) = numbered
        return {"principal": {"principalType": kind, "principalId": id_}, "roleId": role}

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
