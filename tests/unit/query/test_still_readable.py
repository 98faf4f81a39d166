"""A look at the access to what an answer is made from, while the ledger cannot be read."""

from __future__ import annotations

from typing import Any, cast
from uuid import uuid4

import pytest

from pipeline.core.errors import Misconfigured, Retryable
from query.access import still_readable
from query.access.callers import Caller
from query.access.still_readable import StillReadable


@pytest.mark.parametrize("kind", [Retryable, Misconfigured])
async def test_a_ledger_that_cannot_be_read_fails_only_the_look_at_the_end(
    kind: type[Retryable | Misconfigured], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In between, its error would count as one of the model."""
    looks = []

    async def identify() -> Caller:
        looks.append(1)
        raise kind("the ledger cannot be read", service="postgres")

    monkeypatch.setattr(still_readable, "LOOK_SECONDS", 0.0)
    access = StillReadable(cast(Any, None), identify, [uuid4()])
    await access.look()
    assert looks
    with pytest.raises(kind):
        await access.require()
