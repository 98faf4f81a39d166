"""Names and hashes that stored rows already have."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from pipeline.core.identity import meta_hash
from pipeline.ledger.documents import Fields

FIELDS = Fields(
    title="T – ü",
    source_url="https://x/y",
    author=None,
    media_type="text/markdown",
    source_modified_at=datetime(2026, 2, 28, 22, 15, tzinfo=UTC),
    metadata={"b": 1, "a": ["x"]},
)


def test_the_meta_hash_of_stored_documents_does_not_change() -> None:
    """The ledgers hold this hash; with another one every document would count as changed."""
    assert meta_hash(FIELDS).hex() == "2be9d5231899c4ecc727ebf3f88264003202c2b2760b2116f50a4ed6b2ff871d"


def test_a_field_with_its_default_does_not_change_the_meta_hash() -> None:
    @dataclass(frozen=True)
    class Old:
        title: str

    @dataclass(frozen=True)
    class New(Old):
        language: str | None = None
        seen_at: datetime | None = None

    now = datetime(2026, 3, 1, tzinfo=UTC)
    assert meta_hash(New("a")) == meta_hash(Old("a"))
    hashes = {meta_hash(New("a", *later)) for later in [(), ("de",), ("fr",), (None, now), ("de", now)]}
    assert len(hashes) == 5
