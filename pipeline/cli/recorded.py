"""What commands leave in the audit trail: before they show or change anything."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID


def record(
    action: str, *, tenant: str = "", object: str = "", person: str = "", documents: Sequence[UUID] = (),
    principals: Sequence[str] = (), tags: Sequence[str] = (),
) -> None:  # fmt: skip
    """For commands that run no event loop yet."""
    asyncio.run(
        recording(
            action, tenant=tenant, object=object, person=person, documents=documents, principals=principals, tags=tags
        )
    )


async def recording(
    action: str, *, tenant: str = "", object: str = "", person: str = "", documents: Sequence[UUID] = (),
    principals: Sequence[str] = (), tags: Sequence[str] = (), required: bool = False,
) -> None:  # fmt: skip
    """object: ``KIND:NAME``. person: whom it is about, instead; kept as a digest, so that the record of an erasure does
    not keep the name. required: whatever the mode. Raises PenstockError where it has to be written and cannot be; in
    mode ``on`` stderr says so."""
    from pipeline.cli.output import stderr
    from pipeline.core.errors import PenstockError
    from pipeline.settings import load
    from pipeline.trail import access, keys_of, record_now, recorded

    settings = load()
    about = keys_of(settings.trail_keys).name(person) if person else object
    made = recorded(action, tenant=tenant, access=access(principals, tags), object=about, documents=documents)
    try:
        await record_now(settings, "penstock", made)
    except PenstockError as error:
        if required or settings.trail == "required":
            raise
        stderr.print(f"warning: this is not in the audit trail: {error}", markup=False, soft_wrap=True)
