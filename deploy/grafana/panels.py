"""Grafana's panels as plain values: what to ask, in which unit, and where it turns yellow and red.

They are built with grafana-foundation-sdk, which knows Grafana's schema. It is installed for development only: whoever
runs Penstock has the files that it wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    DataSourceRef,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef("prometheus", "${datasource}")
SCHEMA_VERSION = 41
"""The schema of the Grafana in docker-compose.yml. The SDK is newer, and its own version is not migrated there."""

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

    def build(self, number: int) -> stat.Panel | table.Panel | timeseries.Panel:
        panel = (
            self._empty()
            .id(number)
            .title(self.title)
            .description(self.says)
            .datasource(DATASOURCE)
            .span(self.width)
            .height(self.height)
            .unit(self.unit)
            .thresholds(self._thresholds())
        )
        for target in self._targets():
            panel = panel.with_target(target)
        if self.runbook is not None:
            link = builders.DashboardLink("Runbook").url(f"${{runbooks}}/docs/runbooks/{self.runbook}.md")
            panel = panel.links([link.target_blank(True)])
        return panel

    def _empty(self) -> stat.Panel | table.Panel | timeseries.Panel:
        match self.kind:
            case "stat":
                last = common.ReduceDataOptions().calcs(["lastNotNull"])
                return stat.Panel().color_mode(BigValueColorMode.BACKGROUND).reduce_options(last)
            case "table":
                return table.Panel()
            case "timeseries":
                legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
                legend = legend.placement(LegendPlacement.BOTTOM).show_legend(True)
                tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.SINGLE).sort(SortOrder.NONE)
                panel = timeseries.Panel().legend(legend).tooltip(tooltip)
                if self.warn is None and self.alarm is None:
                    return panel
                return panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED))

    def _targets(self) -> Iterator[prometheus.Dataquery]:
        for n, (expression, legend) in enumerate(self.queries):
            query = prometheus.Dataquery().datasource(DATASOURCE).ref_id(chr(ord("A") + n))
            query = query.expr(expression).legend_format(legend)
            if self.kind == "table":
                query = query.format(PromQueryFormat.TABLE)
            yield query.range() if self.kind == "timeseries" else query.instant()

    def _thresholds(self) -> builders.ThresholdsConfig:
        first, *others = ("red", "yellow", "green") if self.falling else ("green", "yellow", "red")
        values = (self.alarm, self.warn) if self.falling else (self.warn, self.alarm)
        steps = [models.Threshold(None, first)]
        steps += [
            models.Threshold(value, colour) for value, colour in zip(values, others, strict=True) if value is not None
        ]
        return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    by_source: bool = False
    """True: it has the variable ``$source``."""

    def json(self) -> str:
        """Return the file that Grafana reads."""
        board = (
            builders.Dashboard(self.title)
            .uid(self.uid)
            .tags(["penstock"])
            .version(1)
            .readonly()
            .timezone("browser")
            .refresh("30s")
            .time("now-3h", "now")
            .link(builders.DashboardLink("Penstock").type(models.DashboardLinkType.DASHBOARDS).tags(["penstock"]))
        )
        for variable in self._variables():
            board = board.with_variable(variable)
        number = 0
        for title, row in self.rows:
            number += 1
            board = board.with_row(builders.Row(title).id(number))
            for panel in row:
                number += 1
                board = board.with_panel(panel.build(number))
        written = board.build()
        written.schema_version = SCHEMA_VERSION
        for shown in (written, *(written.panels or ())):
            for link in getattr(shown, "links", None) or ():
                link.placement = None  # visible; the SDK puts links into a menu
        return json.dumps(written, cls=JSONEncoder, indent=1, ensure_ascii=False) + "\n"

    def _variables(self) -> Iterator[Builder[models.VariableModel]]:
        yield builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        yield (
            builders.TextBoxVariable("runbooks")
            .label("Where the repository is shown")
            .default_value(".")
            .current(models.VariableOption(text=".", value="."))
        )
        if self.by_source:
            values = "label_values(penstock_connector_entries_total, source)"
            yield (
                builders.QueryVariable("source")
                .label("Source")
                .datasource(DATASOURCE)
                .query({"query": values, "refId": "source"})
                .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
                .include_all(True)
                .all_value(".*")
                .multi(False)
                .current(models.VariableOption(text="All", value="$__all"))
            )
