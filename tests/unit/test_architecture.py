"""docs/architecture.md shows the packages and imports that the source has.

python -m tests.unit.test_architecture      # write the diagram anew
"""

from __future__ import annotations

import re
from collections import Counter

from tests.unit.test_imports import LAYERS, ROOT, imported, parsed, place, sources

DOCUMENT = ROOT / "docs" / "architecture.md"
DIAGRAM = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)


def import_counts() -> Counter[tuple[str, str]]:
    """(importing package, imported package): number of import statements."""
    counts: Counter[tuple[str, str]] = Counter()
    for module, path in sources().items():
        importing = place(module)
        assert importing is not None
        for _, name in imported(parsed(path)):
            target = place(name)
            if target is not None and target[1] != importing[1]:
                counts[importing[1], target[1]] += 1
    return counts


def direct(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The edges that no longer way through other packages implies (the transitive reduction)."""
    successors: dict[str, set[str]] = {}
    for source, target in edges:
        successors.setdefault(source, set()).add(target)

    def reachable(start: str) -> set[str]:
        reached: set[str] = set()
        pending = [start]
        while pending:
            new = successors.get(pending.pop(), set()) - reached
            reached |= new
            pending += new
        return reached

    return {
        (source, target)
        for source, target in edges
        if not any(target in reachable(other) for other in successors[source] - {target})
    }


def diagram() -> str:
    """The packages, highest layer first, and the imports between them, in Mermaid's language."""
    counts = import_counts()
    lines = ["flowchart TD"]
    for layer in reversed(LAYERS):
        for package in layer:
            lines.append(f'    {package.replace(".", "_")}["{package}"]')
    for source, target in sorted(direct(set(counts))):
        lines.append(f"    {source.replace('.', '_')} --> {target.replace('.', '_')}")
    return "\n".join(lines) + "\n"


def test_the_architecture_diagram_is_up_to_date() -> None:
    shown = DIAGRAM.search(DOCUMENT.read_text())
    assert shown is not None
    assert shown[0] == diagram(), "write it anew: python -m tests.unit.test_architecture"


def test_every_package_is_described_in_the_architecture_document() -> None:
    text = DOCUMENT.read_text()
    assert [package for layer in LAYERS for package in layer if f"| `{package}` |" not in text] == []


if __name__ == "__main__":
    DOCUMENT.write_text(DIAGRAM.sub(lambda _: diagram(), DOCUMENT.read_text(), count=1))
