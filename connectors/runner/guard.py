"""The guard against mass deletion: a listing that lacks many documents is more often incomplete than right."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.core.errors import Misconfigured, PenstockError

MASS_DELETE_SHARE = 0.3
MASS_DELETE_DOCUMENTS = 20
"""An operator has to confirm a deletion of more than this share and of more than this many documents."""


def is_mass_deletion(missing: int, published: int) -> bool:
    """Whether an operator has to confirm the deletion of so many of the published documents."""
    return missing > max(MASS_DELETE_DOCUMENTS, MASS_DELETE_SHARE * published)


FAILING_SHARE = 0.9
FAILING_DOCUMENTS = 5
"""If at least so many documents are set aside, and so large a share, it is the source's or the connector's fault."""
LIKELY_REASON = "the source may have changed its format, or the connector's code has a fault"


def is_failing(set_aside: int, read: int) -> bool:
    """Whether so many of the documents that were read are set aside that the source counts as failing."""
    return set_aside >= max(FAILING_DOCUMENTS, FAILING_SHARE * read)


def require_readable(things: str, failed: Collection[PenstockError], read: int) -> None:
    """Raise Misconfigured, before any membership changes, if the data of nearly all groups or accounts cannot be read:
    a changed format must not lock everybody out. failed: the errors of those. read: how many others were read."""
    if is_failing(len(failed), len(failed) + read):
        raise Misconfigured(
            f"{len(failed)} of {len(failed) + read} {things} cannot be read, so no membership is changed:"
            f" {LIKELY_REASON} ({next(iter(failed))})"
        )
