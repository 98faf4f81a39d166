"""Commands record an action in the audit trail before they show or change anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec
from uuid import UUID

if TYPE_CHECKING:
    from pipeline.runtime.settings import Settings

P = ParamSpec("P")


async def recording(
    action: str,
    *,
    tenant: str = "",
    object: str = "",
    person: str = "",
    documents: Sequence[UUID] = (),
    principals: Sequence[str] = (),
    tags: Sequence[str] = (),
    required: bool = False,
) -> None:
    """object: ``KIND:NAME``. person: the person concerned, in place of an object; stored as a digest, so that the
    record of an erasure does not retain the name. required: record in any mode. Raises PenstockError where it is
    required and cannot be written; in mode ``on`` a warning goes to stderr."""
    from cli.output import stderr
    from pipeline.core.errors import PenstockError
    from pipeline.runtime.settings import load
    from pipeline.trail import access, keys_of, record_now, recorded

    settings = load()
    if required:
        settings = settings.model_copy(update={"trail": "required"})
    about = keys_of(settings.trail_keys).name(person) if person else object
    entry = recorded(action, tenant=tenant, access=access(principals, tags), object=about, documents=documents)
    try:
        await record_now(settings, "penstock", entry)
    except PenstockError as error:
        if settings.trail == "required":
            raise
        stderr.print(f"warning: this action is not recorded in the audit trail: {error}", markup=False, soft_wrap=True)


def _run(function: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The same for callers without an event loop."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> None:
        asyncio.run(function(*args, **options))

    return run


record = _run(recording)
"""``recording`` for commands that run no event loop yet."""


async def able_to_record(settings: Settings) -> Settings:
    """Return the settings for a command that writes records one by one, as services do. If other processes write with a
    key and none is set here, the trail is off in them, and stderr says so. Raises PenstockError if the trail is
    required, or cannot be looked up."""
    from cli.output import stderr
    from pipeline.core.errors import Misconfigured
    from pipeline.trail import check_key

    try:
        await check_key(settings)
    except Misconfigured as error:
        if settings.trail == "required":
            raise
        stderr.print(f"warning: this action is not recorded in the audit trail: {error}", markup=False, soft_wrap=True)
        return settings.model_copy(update={"trail": "off"})
    return settings
