"""The topics that each task of the analysis worker reads. The tasks themselves are put together by ``penstock worker
analysis``, because some belong to layers that this one does not know."""

from __future__ import annotations

from collections.abc import Mapping

from topics.registry import DOCUMENTS_INDEXED, IDENTITIES, Topic

TOPICS: Mapping[str, tuple[Topic, ...]] = {
    "conflicts": (DOCUMENTS_INDEXED, IDENTITIES),
    "standing": (DOCUMENTS_INDEXED, IDENTITIES),
}
"""Name of a task → the topics it reads, the first for its lag in `penstock status`."""
