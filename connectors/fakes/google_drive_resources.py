"""Items as JSON, field by field as the discovery document describes them (a test holds them to it)."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from connectors.fakes.google_drive_corpus import FOLDER, SHORTCUT, Change, Corpus, Grant, Held, Item
from connectors.fakes.google_drive_fields import Mask, parse

GOOGLE = "application/vnd.google-apps."

USER = parse("kind,displayName,me,permissionId,emailAddress")
PERMISSION = parse(
    "kind,id,type,role,emailAddress,domain,displayName,expirationTime,deleted,allowFileDiscovery,view,pendingOwner,"
    "inheritedPermissionsDisabled,permissionDetails(permissionType,inheritedFrom,role,inherited)"
)
FILE: Mask = {
    **parse(
        "kind,id,name,mimeType,description,trashed,explicitlyTrashed,parents,version,createdTime,modifiedTime,driveId,"
        "teamDriveId,md5Checksum,sha256Checksum,size,headRevisionId,fileExtension,webViewLink,shared,ownedByMe,spaces,"
        "hasAugmentedPermissions,inheritedPermissionsDisabled,permissionIds,copyRequiresWriterPermission,exportLinks,"
        "capabilities(canDownload,canCopy,canShare,canListChildren,canReadDrive),shortcutDetails(targetId,targetMimeType),"
        "clientEncryptionDetails(encryptionState)"
    ),
    "owners": USER,
    "lastModifyingUser": USER,
    "permissions": PERMISSION,
}
DRIVE = parse("kind,id,name,createdTime,hidden,capabilities(canListChildren,canShare,canReadRevisions)")
CHANGE: Mask = {**parse("kind,changeType,type,time,removed,fileId,driveId,teamDriveId"), "file": FILE, "drive": DRIVE}


def rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def user(address: str, account: str) -> dict[str, Any]:
    return {
        "kind": "drive#user",
        "displayName": address.partition("@")[0].replace(".", " ").title(),
        "me": address == account,
        "permissionId": Grant(type="user", who=address).id,
        "emailAddress": address,
    }


def permission(held: list[Held], corpus: Corpus, *, drive: str | None, of_drive: bool = False) -> dict[str, Any]:
    """held: one grantee's, its own first. A file in a shared drive tells where each role comes from."""
    grant = held[0].grant
    shown: dict[str, Any] = {"kind": "drive#permission", "id": grant.id, "type": grant.type, "role": grant.role}
    if grant.type in ("user", "group"):
        shown |= {"emailAddress": grant.who, "displayName": grant.who.partition("@")[0], "deleted": grant.deleted}
    if grant.type == "domain":
        shown |= {"domain": grant.who, "displayName": grant.who}
    if grant.type in ("domain", "anyone"):
        shown["allowFileDiscovery"] = grant.discoverable
    if grant.expires:
        shown["expirationTime"] = rfc3339(grant.expires)
    if grant.view:
        shown["view"] = grant.view
    if drive:
        shown["permissionDetails"] = [
            {
                "permissionType": "member" if of_drive or one.origin == drive else "file",
                "role": one.grant.role,
                "inherited": one.origin is not None,
                **({"inheritedFrom": one.origin} if one.origin else {}),
            }
            for one in held
        ]
    elif grant.type == "user":
        shown["pendingOwner"] = False
    return shown


def file(item: Item, corpus: Corpus, account: str) -> dict[str, Any]:
    held = corpus.permissions(item)
    roles = corpus.roles(account, item)
    may_share = bool(roles & {"owner", "organizer", "fileOrganizer", "writer"})
    native = item.mime_type.startswith(GOOGLE)
    shown: dict[str, Any] = {
        "kind": "drive#file",
        "id": item.id,
        "name": item.name,
        "mimeType": item.mime_type,
        "trashed": corpus.is_trashed(item),
        "explicitlyTrashed": item.trashed,
        "version": str(item.version),
        "createdTime": rfc3339(item.created),
        "modifiedTime": rfc3339(item.modified),
        "spaces": ["drive"],
        "webViewLink": f"https://drive.google.com/file/d/{item.id}/view?usp=drivesdk",
        "inheritedPermissionsDisabled": item.limited,
        "copyRequiresWriterPermission": not item.download,
        "permissionIds": sorted(held),
        "lastModifyingUser": user(item.modifier, account),
        "capabilities": {
            "canDownload": item.download and item.mime_type != FOLDER,
            "canCopy": item.download,
            "canShare": may_share,
            "canListChildren": item.mime_type == FOLDER,
        },
    }
    if item.parent:
        shown["parents"] = [item.parent]
    if item.drive:
        shown |= {"driveId": item.drive, "teamDriveId": item.drive, "hasAugmentedPermissions": bool(item.grants)}
    else:
        assert item.owner is not None
        shown |= {
            "owners": [user(item.owner, account)],
            "ownedByMe": item.owner == account,
            "shared": len(held) > 1,
            "parents": [item.parent or f"root-of-{item.owner}"],
        }
        if may_share:
            shown["permissions"] = [permission(one, corpus, drive=None) for one in held.values()]
    if not native:
        shown |= {
            "md5Checksum": hashlib.md5(item.content).hexdigest(),  # noqa: S324 - Google's field
            "sha256Checksum": hashlib.sha256(item.content).hexdigest(),
            "size": str(len(item.content)),
            "headRevisionId": f"0B{hashlib.sha256(item.content).hexdigest()[:24]}",
            "fileExtension": item.name.rpartition(".")[2] if "." in item.name else "",
        }
    elif item.mime_type == SHORTCUT and item.target:
        target = corpus.items.get(item.target)
        mime = target.mime_type if target else "application/octet-stream"
        shown["shortcutDetails"] = {"targetId": item.target, "targetMimeType": mime}
    if item.encrypted:
        shown["clientEncryptionDetails"] = {"encryptionState": "encrypted"}
    return shown


def drive(id_: str, corpus: Corpus, account: str) -> dict[str, Any]:
    roles = corpus.roles(account, corpus.items[id_])
    return {
        "kind": "drive#drive",
        "id": id_,
        "name": corpus.drives[id_],
        "createdTime": rfc3339(corpus.items[id_].created),
        "hidden": False,
        "capabilities": {"canListChildren": True, "canReadRevisions": True, "canShare": "organizer" in roles},
    }


def change(entry: Change, corpus: Corpus, account: str) -> dict[str, Any]:
    """``removed``: deleted, no longer ours to read, or no longer in this drive."""
    shown: dict[str, Any] = {
        "kind": "drive#change",
        "changeType": entry.kind,
        "type": entry.kind,
        "time": rfc3339(entry.at),
        "removed": True,
    }
    item = corpus.items.get(entry.id)
    if entry.kind == "drive":
        shown |= {"driveId": entry.id, "teamDriveId": entry.id}
        if item is not None and corpus.roles(account, item):
            shown |= {"removed": False, "drive": drive(entry.id, corpus, account)}
        return shown
    shown["fileId"] = entry.id
    if item is not None and item.drive == entry.log and corpus.finds(account, item):
        shown |= {"removed": False, "file": file(item, corpus, account)}
    return shown
