"""The guard against mass deletion: a listing that lacks much is more often incomplete than right."""

from __future__ import annotations

MASS_SHARE = 0.3
MASS_COUNT = 20
"""More than this share and more than this many documents that are missing at once need confirmation."""


def is_mass_deletion(missing: int, published: int) -> bool:
    """Whether so many of the published documents are missing that somebody has to confirm their deletion."""
    return missing > max(MASS_COUNT, MASS_SHARE * published)
