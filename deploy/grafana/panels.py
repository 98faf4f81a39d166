"""Grafana's panels as plain values: what to ask, in which unit, and where it turns yellow and red."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Columns of Grafana's grid."""

Unit = Literal["s", "percentunit", "short", "none", "reqps", "ops", "dateTimeFromNow"]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: Sequence[tuple[str, str]]
    """PromQL, and the legend."""
    unit: Unit = "short"
    says: str = ""
    """Explanation, where the title is not enough."""
    kind: Literal["stat", "timeseries", "table"] = "timeseries"
    warn: float | None = None
    alarm: float | None = None
    """From here on it is red; warn: yellow. Both None: never."""
    falling: bool = False
    """Red is below, not above."""
    runbook: str | None = None
    """Name of a file in docs/runbooks."""
    width: int = 8
    height: int = 7

    def json(self, number: int, x: int, y: int) -> dict[str, Any]:
        instant = self.kind != "timeseries"
        shown: dict[str, Any] = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.says,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [
                {
                    "refId": chr(ord("A") + n),
                    "datasource": DATASOURCE,
                    "expr": expression,
                    "legendFormat": legend,
                    "instant": instant,
                    "range": not instant,
                    **({"format": "table"} if self.kind == "table" else {}),
                }
                for n, (expression, legend) in enumerate(self.queries)
            ],
            "fieldConfig": {"defaults": {"unit": self.unit, "thresholds": self._thresholds()}, "overrides": []},
            "options": {},
        }
        if self.kind == "stat":
            shown["options"] = {"colorMode": "background", "reduceOptions": {"calcs": ["lastNotNull"]}}
        if self.kind == "timeseries" and (self.warn is not None or self.alarm is not None):
            shown["fieldConfig"]["defaults"]["custom"] = {"thresholdsStyle": {"mode": "dashed"}}
        if self.runbook is not None:
            path = f"docs/runbooks/{self.runbook}.md"
            shown["links"] = [{"title": "Runbook", "url": f"${{runbooks}}/{path}", "targetBlank": True}]
        return shown

    def _thresholds(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = [{"color": "red" if self.falling else "green", "value": None}]
        if self.falling:
            steps += [{"color": "yellow", "value": self.alarm}] if self.alarm is not None else []
            steps += [{"color": "green", "value": self.warn}] if self.warn is not None else []
        else:
            steps += [{"color": "yellow", "value": self.warn}] if self.warn is not None else []
            steps += [{"color": "red", "value": self.alarm}] if self.alarm is not None else []
        return {"mode": "absolute", "steps": steps}


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    by_source: bool = False
    """True: it has the variable ``$source``."""

    def json(self) -> dict[str, Any]:
        panels: list[dict[str, Any]] = []
        y = 0
        for title, row in self.rows:
            panels.append(
                {
                    "id": len(panels) + 1,
                    "type": "row",
                    "title": title,
                    "collapsed": False,
                    "panels": [],
                    "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                }
            )
            y += 1
            x = tallest = 0
            for panel in row:
                if x + panel.width > WIDTH:
                    x, y, tallest = 0, y + tallest, 0
                panels.append(panel.json(len(panels) + 1, x, y))
                x, tallest = x + panel.width, max(tallest, panel.height)
            y += tallest
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["penstock"],
            "schemaVersion": 41,
            "version": 1,
            "editable": False,
            "timezone": "browser",
            "refresh": "30s",
            "time": {"from": "now-3h", "to": "now"},
            "links": [{"type": "dashboards", "tags": ["penstock"], "asDropdown": False, "title": "Penstock"}],
            "templating": {"list": self._variables()},
            "panels": panels,
        }

    def _variables(self) -> list[dict[str, Any]]:
        panels: list[dict[str, Any]] = [
            {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
            {
                "name": "runbooks",
                "label": "Where the repository is shown",
                "type": "textbox",
                "query": ".",
                "current": {"text": ".", "value": "."},
            },
        ]
        if self.by_source:
            panels.append(
                {
                    "name": "source",
                    "label": "Source",
                    "type": "query",
                    "datasource": DATASOURCE,
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": False,
                    "refresh": 2,
                    "current": {"text": "All", "value": "$__all"},
                    "query": {"query": "label_values(penstock_connector_entries_total, source)", "refId": "source"},
                }
            )
        return panels
