"""What exactly is missing before an instance can work, one problem each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Any

from connectors.google_drive.api import FOLDER, PLACE, Api
from connectors.google_drive.options import GoogleDriveOptions
from connectors.google_drive.scope import missing_drive, missing_folder
from connectors.protocol import Problem
from connectors.web import Answered, Denied, Missing
from pipeline.core.errors import Misconfigured


async def problems(options: GoogleDriveOptions, api: Api, name: str) -> AsyncIterator[Problem]:
    """Raises Retryable when Google cannot be asked now."""
    try:
        await api.drive_auth.token()
        await api.start_page_token(None)
    except (Misconfigured, Answered) as error:
        yield Problem(name, "credential", str(error))
        return  # nothing else can be asked
    for drive in options.drives:
        if problem := await _drive(drive, api):
            yield problem
    if options.all_drives and not await api.drives():
        yield Problem(name, "drive", f"all_drives: {api.email} (or the subject) is a member of no shared drive")
    for folder in options.folders:
        if problem := await _folder(folder, api):
            yield problem
    if options.directory:
        async for problem in _directory(options, api, name):
            yield problem


async def _drive(drive: str, api: Api) -> Problem | None:
    try:
        await api.drive(drive)
        await api.permissions(drive)
    except Missing:
        return Problem(drive, "drive", missing_drive(drive, api))
    except Denied as error:
        return Problem(
            drive, "permissions",
            f"drives: the members of {drive} may not be listed ({error.code}), so nobody could read anything of it:"
            f" give {api.email} (or the subject) a higher role there",
        )  # fmt: skip
    return None


async def _folder(folder: str, api: Api) -> Problem | None:
    try:
        place = await api.file(folder, f"{PLACE},capabilities(canShare)")
    except Missing:
        return Problem(folder, "folder", missing_folder(folder, api))
    if place.get("mimeType") != FOLDER:
        return Problem(folder, "folder", f"folders: {folder} is no folder")
    if not place.get("driveId") and not (place.get("capabilities") or {}).get("canShare"):
        return Problem(
            folder, "permissions",
            f"folders: {folder} is in somebody's My Drive, where only those who may share see who may read: make"
            f" {api.email} (or the subject) an Editor of it, or nobody will find anything of it",
        )  # fmt: skip
    return None


async def _directory(options: GoogleDriveOptions, api: Api, name: str) -> AsyncIterator[Problem]:
    who = options.directory_subject or options.subject or api.email
    try:
        await api.directory_auth.token()
    except Misconfigured as error:
        yield Problem(name, "directory", f"{error}; without it nobody reads through groups (or set directory = false)")
        return
    for domain in options.domains:
        try:
            await _first(api.users(domain))
        except (Answered, Misconfigured) as error:
            yield Problem(domain, "directory", f"domains: {who} may not list the users of {domain}: {error}")
    try:
        # No group is known here; whoever may ask is told that this one does not exist.
        await _first(api.members(f"penstock-check@{who.partition('@')[2]}"))
    except Missing:
        return
    except (Answered, Misconfigured) as error:
        yield Problem(name, "directory", f"{who} may not see who is in a group (Groups > Read): {error}")


async def _first(found: AsyncIterator[Any]) -> None:
    step: Awaitable[Any] = anext(found, None)
    await step
