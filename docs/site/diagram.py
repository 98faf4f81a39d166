"""Diagrams in Mermaid's language as SVG, so that a reader's browser needs no program for them.

Only flowcharts of the form that ``docs/architecture.md`` has: ``name["label"]`` and ``name --> name``, one a line.
Colours are those of the surrounding text, so that a diagram is readable on light and on dark pages.
"""

from __future__ import annotations

import re
from xml.sax.saxutils import escape

import graphlay

NODE, EDGE = re.compile(r'(\w+)\["([^"]+)"\]'), re.compile(r"(\w+) --> (\w+)")
CHARACTER, PADDING, HEIGHT = 8.0, 28.0, 34.0
"""Pixels: the width of a letter in the font below, and a box's besides them and in height."""


def svg(source: str) -> str:
    """Raises ValueError, with the line, for what is no flowchart of that form."""
    graph, labels = graphlay.Graph(), dict[str, str]()
    head, *lines = source.strip().splitlines()
    if head.split() != ["flowchart", "TD"]:
        raise ValueError(f"only `flowchart TD` is drawn, not {head!r}")
    for line in map(str.strip, lines):
        if node := NODE.fullmatch(line):
            labels[node[1]] = node[2]
            graph.node(node[1], width=CHARACTER * len(node[2]) + PADDING, height=HEIGHT)
        elif edge := EDGE.fullmatch(line):
            graph.edge(edge[1], edge[2])
        else:
            raise ValueError(f"this line of a flowchart is not understood: {line!r}")
    layout = graphlay.layout(graph, options={"direction": "topbottom"})
    arrows = [_arrow([(point["x"], point["y"]) for point in edge["points"]]) for edge in layout.edges]
    boxes = [_box(label, *layout.positions()[name]) for name, label in labels.items()]
    low, high = layout.bounds["min"], layout.bounds["max"]
    left, top, width, height = low["x"] - 2, low["y"] - 2, high["x"] - low["x"] + 4, high["y"] - low["y"] + 4
    return (
        f'<svg class="diagram" xmlns="http://www.w3.org/2000/svg" viewBox="{left:g} {top:g} {width:g} {height:g}"'
        f' style="max-width: {width:g}px" role="img" aria-label="{escape(", ".join(labels.values()))}">'
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path d="M0 0 10 5 0 10z"/></marker></defs>'
        f"{''.join(arrows)}{''.join(boxes)}</svg>"
    )


def _arrow(points: list[tuple[float, float]]) -> str:
    return f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in points)}" marker-end="url(#arrow)"/>'


def _box(label: str, x: float, y: float) -> str:
    width = CHARACTER * len(label) + PADDING
    return (
        f'<rect x="{x - width / 2:g}" y="{y - HEIGHT / 2:g}" width="{width:g}" height="{HEIGHT:g}" rx="5"/>'
        f'<text x="{x:g}" y="{y:g}">{escape(label)}</text>'
    )
