"""A picture of the overview for readers who have no Grafana at hand: its own queries asked of a running Prometheus, on
its own grid. ``python -m deploy.grafana.picture http://127.0.0.1:9090 overview.png`` (matplotlib: the extra ``dev``).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deploy.grafana.panels import WIDTH

BOARD = Path(__file__).with_name("penstock-overview.json")
POINTS = 120
RATE = "1m"
"""For ``$__rate_interval``: four times the interval at which prometheus.yml scrapes."""
INCH = 0.68, 0.34
"""Inches of one cell of the grid, across and down."""
COLOURS = {"green": "#3a9a55", "yellow": "#d9a514", "red": "#cc3b3b"}
MOST_LINES = 8
"""In a legend."""

Series = tuple[str, Sequence[float], Sequence[float]]
"""Name, seconds before now (negative), values."""


def query_series(prometheus: httpx.Client, target: Mapping[str, Any], minutes: float, now: float) -> list[Series]:
    """The result of one query over the last minutes, or now for an instant query. Raises httpx.HTTPError."""
    expression = target["expr"].replace("$__rate_interval", RATE)
    if target["instant"]:
        answer = prometheus.get("/api/v1/query", params={"query": expression, "time": now})
    else:
        answer = prometheus.get(
            "/api/v1/query_range",
            params={
                "query": expression,
                "start": now - 60 * minutes,
                "end": now,
                "step": 60 * minutes / POINTS,
            },
        )
    answer.raise_for_status()
    series: list[Series] = []
    for result in answer.json()["data"]["result"]:
        name = target["legendFormat"]
        for label, value in result["metric"].items():
            name = name.replace("{{" + label + "}}", value)
        values = result["values"] if "values" in result else [result["value"]]
        points = [(at - now, float(value)) for at, value in values if not math.isnan(float(value))]
        if points:
            xs, ys = zip(*points, strict=True)
            series.append((name.partition("{{")[0].strip(), xs, ys))
    return series


def worded(value: float, unit: str) -> str:
    match unit:
        case "s":
            return (
                f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"
            )
        case "percentunit":
            return f"{value:.1%}".replace(".0%", "%")
        case _:
            return f"{value:,.0f}" if value == round(value) else f"{value:,.2g}"


def colour(value: float, steps: Sequence[Mapping[str, Any]]) -> str:
    """Colour of the last threshold that the value has reached."""
    passed = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return COLOURS[passed[-1]]


def draw(axes: Axes, panel: Mapping[str, Any], series: Sequence[Series], minutes: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    unit, steps = defaults["unit"], defaults["thresholds"]["steps"]
    axes.set_title(panel["title"], loc="left", fontsize=8.5, fontweight="bold")
    if panel["type"] != "timeseries":
        axes.set_axis_off()
        last_values = [(name, ys[-1]) for name, _, ys in series]
        if panel["type"] == "table":
            rows = "\n".join(f"{worded(value, unit)}  {name}" for name, value in last_values)
            axes.text(0, 0.9, rows, va="top", fontsize=8, linespacing=1.6, transform=axes.transAxes)
            return
        for n, (name, value) in enumerate(last_values):
            x = (n + 0.5) / len(last_values)
            axes.text(
                x,
                0.55,
                worded(value, unit),
                ha="center",
                va="center",
                fontsize=22 if len(last_values) < 4 else 14,
                color=colour(value, steps),
                fontweight="bold",
                transform=axes.transAxes,
            )
            axes.text(x, 0.16, name, ha="center", va="center", fontsize=7, color="#555", transform=axes.transAxes)
        return
    for name, xs, ys in series:
        axes.plot([x / 60 for x in xs], ys, linewidth=1.2, label=name or None)
    axes.set_xlim(-minutes, 0)
    top = max((y for _, _, ys in series for y in ys), default=0.0) or 1.0
    for step in steps[1:]:
        if step["value"] <= 1.5 * top:
            axes.axhline(step["value"], color=COLOURS[step["color"]], linewidth=0.9, linestyle="--")
            top = max(top, step["value"])
    axes.set_ylim(-0.02 * top, 1.05 * top)  # a line at zero shows
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} min" if value else "now")
    axes.yaxis.set_major_formatter(lambda value, _: worded(value, unit))
    axes.tick_params(labelsize=6.5)
    axes.grid(visible=True, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if any(name for name, _, _ in series):
        axes.legend(
            *(entries[:MOST_LINES] for entries in axes.get_legend_handles_labels()),
            fontsize=6,
            frameon=False,
            loc="upper left",
        )


def picture(prometheus: httpx.Client, minutes: float) -> Figure:
    """The overview as it is now. Raises httpx.HTTPError."""
    board = json.loads(BOARD.read_text())
    now = time.time()
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = Figure(figsize=(WIDTH * INCH[0], (rows + 3) * INCH[1]), facecolor="white")
    whole = rows + 3
    for panel in board["panels"]:
        at = panel["gridPos"]
        x, y = at["x"] / WIDTH, 1 - (at["y"] + 1 + at["h"]) / whole
        if panel["type"] == "row":
            figure.text(0.01, y + 0.3 / whole, panel["title"], fontsize=11, fontweight="bold", color="#1f4e79")
            continue
        axes = figure.add_axes((x + 0.035, y + 1.1 / whole, at["w"] / WIDTH - 0.05, (at["h"] - 2.4) / whole))
        lines = [line for target in panel["targets"] for line in query_series(prometheus, target, minutes, now)]
        draw(axes, panel, lines, minutes)
    figure.text(
        0.01,
        0.4 / whole,
        f"Drawn by deploy/grafana/picture.py from the queries of {BOARD.name} and a running system's Prometheus (the"
        f" last {minutes:g} minutes); Grafana draws the same otherwise.",
        fontsize=8,
        color="#555",
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prometheus", help="its address, http://host:9090")
    parser.add_argument("file", type=Path, help="what to write: .png or .svg")
    parser.add_argument("--minutes", type=float, default=180.0, help="how far back (default: 180, as the dashboard)")
    options = parser.parse_args()
    with httpx.Client(base_url=options.prometheus, timeout=30, trust_env=False) as prometheus:
        picture(prometheus, options.minutes).savefig(options.file, dpi=110)


if __name__ == "__main__":
    main()
