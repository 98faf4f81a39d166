"""The list of the decision records, by number."""

from __future__ import annotations

from pathlib import Path

from docs.site.markdown import table

RECORDS = Path(__file__).parents[1] / "adr"


def document() -> str:
    rows = []
    for path in sorted(RECORDS.glob("[0-9]*.md")):
        with path.open() as file:
            number, _, title = file.readline().removeprefix("# ").strip().partition(". ")
        rows.append((str(int(number)), f"[{title}]({path.name})"))
    return table(("", "decision"), rows)
