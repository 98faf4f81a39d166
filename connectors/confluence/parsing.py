"""JSON of both APIs → the model. Raises KeyError, TypeError or ValueError for what lacks a part that must be there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from connectors.confluence.model import Changed, Content, Kind, Person, Readers, Remark, restriction_tag

Json = Mapping[str, Any]


def _dig(json: Any, *path: str) -> Any:
    """None where a step is missing or is no object."""
    for part in path:
        json = json.get(part) if isinstance(json, Mapping) else None
    return json


def person(json: Json) -> Person:
    """Of a user, in either API."""
    return Person(
        id=str(json.get("accountId") or json.get("userKey") or ""),
        name=str(json.get("displayName") or json.get("publicName") or ""),
        username=str(json.get("username") or ""),
        email=str(json.get("email") or ""),
    )


# v1


def content_v1(json: Json, space: str | None = None) -> Content:
    kind = cast("Kind", json["type"])
    attached = kind == "attachment"
    return Content(
        id=str(json["id"]), kind=kind, space=space or str(json["space"]["key"]), title=str(json["title"]),
        number=int(json["version"]["number"]), when=str(json["version"]["when"]),
        webui=str(_dig(json, "_links", "webui") or "") if not attached else "",
        author=person((not attached and _dig(json, "history", "createdBy")) or _dig(json, "version", "by") or {}).id,
        body=_dig(json, "body", "storage", "value"),
        container=str(_dig(json, "container", "id") or "") or None if attached else None,
        media_type=str(_dig(json, "extensions", "mediaType") or _dig(json, "metadata", "mediaType") or ""),
        size=int(_dig(json, "extensions", "fileSize") or 0), download=str(_dig(json, "_links", "download") or ""),
    )  # fmt: skip


def people_in(json: Json) -> Iterable[Person]:
    """Whom a v1 content names: its creator and the author of its version."""
    for found in (_dig(json, "history", "createdBy"), _dig(json, "version", "by")):
        if isinstance(found, Mapping) and (one := person(found)).id:
            yield one


def remark_v1(json: Json) -> Remark:
    above = json.get("ancestors") or []
    inline = _dig(json, "extensions", "location") == "inline"
    return Remark(
        id=str(json["id"]), number=int(json["version"]["number"]), when=str(json["version"]["when"]),
        body=str(_dig(json, "body", "storage", "value") or ""), parent=str(above[-1]["id"]) if above else None,
        selection=str(_dig(json, "extensions", "inlineProperties", "originalSelection") or "") if inline else None,
        author=person(_dig(json, "history", "createdBy") or _dig(json, "version", "by") or {}).id,
    )  # fmt: skip


def changed_v1(json: Json) -> Changed:
    container = _dig(json, "container", "id")
    version = json["version"]
    return Changed(str(json["id"]), json["type"], str(container) if container else None,
                   f"{version['number']}@{version['when']}")  # fmt: skip


def is_restricted(json: Json) -> bool | None:
    """Whether a content has a view restriction of its own; None: the answer does not tell."""
    who = _dig(json, "restrictions", "read", "restrictions")
    counts = [_count(_dig(who, one)) for one in ("user", "group")]
    return None if None in counts else any(counts)


def _count(json: Any) -> int | None:
    found = _dig(json, "results")
    return max(len(found), int(_dig(json, "size") or 0)) if isinstance(found, list) else None


def required(json: Json) -> tuple[str, ...] | None:
    """A tag for each view restriction on a content and its ancestors, as one answer shows them; None: not certain."""
    above = json.get("ancestors")
    if not isinstance(above, list):
        return None
    found = [(str(one["id"]), is_restricted(one)) for one in [*above, json]]
    if any(restricted is None for _, restricted in found):
        return None
    return tuple(restriction_tag(id_) for id_, restricted in found if restricted)


def readers_v1(who: Json) -> Readers:
    """Of ``restrictions`` in an answer about one operation: ``user`` and ``group`` lists."""
    people = [person(one) for one in who["user"]["results"]]
    return Readers(people, [group_name(one) for one in who["group"]["results"]])


def group_name(json: Json) -> str:
    """Cloud: its id; Data Center knows only names."""
    return str(json.get("id") or json["name"])


# v2


def content_v2(json: Json, kind: Kind, space: str) -> Content:
    version = json["version"]
    parent = json.get("parentId")
    return Content(
        id=str(json["id"]), kind=kind, space=space, title=str(json["title"]), number=int(version["number"]),
        when=str(version["createdAt"]), webui=str(_dig(json, "_links", "webui") or ""),
        author=str(json.get("authorId") or version.get("authorId") or ""),
        body=_dig(json, "body", "storage", "value"), parent=str(parent) if parent else None,
        parent_kind=str(json.get("parentType") or "") if parent else "",
    )  # fmt: skip


def attachment_v2(json: Json, space: str) -> Content:
    version = json["version"]
    return Content(
        id=str(json["id"]), kind="attachment", space=space, title=str(json["title"]), number=int(version["number"]),
        when=str(version["createdAt"]), author=str(version.get("authorId") or ""), container=container_v2(json),
        media_type=str(json.get("mediaType") or ""), size=int(json.get("fileSize") or 0),
    )  # fmt: skip


def container_v2(json: Json) -> str | None:
    found = json.get("pageId") or json.get("blogPostId")
    return str(found) if found else None


def remark_v2(json: Json, parent: str | None) -> Remark:
    version = json["version"]
    selection = _dig(json, "properties", "inlineOriginalSelection")
    return Remark(
        id=str(json["id"]), number=int(version["number"]), when=str(version["createdAt"]),
        body=str(_dig(json, "body", "storage", "value") or ""), parent=parent,
        selection=str(selection) if selection else None, author=str(version.get("authorId") or ""),
    )  # fmt: skip
