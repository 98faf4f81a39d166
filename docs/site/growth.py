"""The table of what each table of Postgres grows with."""

from __future__ import annotations

from docs.site.markdown import code, table
from pipeline.ledger.growth import GROWTH


def document() -> str:
    return table(
        ("table", "a row for", "grows with", "ended or limited by"),
        [(code(name), growth.rows, growth.kind, growth.bound) for name, growth in GROWTH.items()],
    )
