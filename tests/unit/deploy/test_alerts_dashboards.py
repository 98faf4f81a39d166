"""The dashboards as they are checked in."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
EACH = pytest.mark.parametrize(
    "board", [json.loads(file.read_text()) for file in FILES], ids=[file.stem for file in FILES]
)


@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")  # whatever one imports of the SDK
def test_the_dashboard_files_match_the_generated_ones() -> None:
    from deploy.grafana import dashboards

    assert {file: file.read_text() for file in FILES} == dashboards.files(), "run `python -m deploy.grafana.dashboards`"


@EACH
def test_dashboards_use_the_datasource_variable_throughout(board: dict[str, Any]) -> None:
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables[0] == "datasource"
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert {json.dumps(of["datasource"]) for panel in panels for of in (panel, *panel["targets"])} == {
        json.dumps({"type": "prometheus", "uid": "${datasource}"})
    }
    assert ("$source" in json.dumps(panels)) == ("source" in variables)


@EACH
def test_panels_have_units_and_unique_titles_and_do_not_overlap(board: dict[str, Any]) -> None:
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels if panel["type"] != "row")
    for pair, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart_x = pair["x"] + pair["w"] <= other["x"] or other["x"] + other["w"] <= pair["x"]
        apart_y = pair["y"] + pair["h"] <= other["y"] or other["y"] + other["h"] <= pair["y"]
        assert apart_x or apart_y
        assert pair["x"] + pair["w"] <= 24


@EACH
def test_every_dashboard_link_leads_to_a_runbook(board: dict[str, Any]) -> None:
    links = [link["url"] for panel in board["panels"] for link in panel.get("links", ())]
    assert links
    for link in links:
        assert (ROOT / link.removeprefix("${runbooks}/")).is_file()


@EACH
def test_panel_thresholds_are_ascending(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        if panel["type"] != "row":
            steps = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
            assert steps[0] is None, "the colour below all values"
            assert steps[1:] == sorted(steps[1:]), panel["title"]


def test_dashboard_uids_are_stable() -> None:
    """Links from elsewhere hold them."""
    assert [json.loads(file.read_text())["uid"] for file in FILES] == [
        "penstock-connectors",
        "penstock-overview",
        "penstock-query",
        "penstock-stages",
    ]


@EACH
def test_dashboards_show_what_the_sdk_hides_and_are_of_the_schema_of_our_grafana(board: dict[str, Any]) -> None:
    """The SDK's own defaults would hide legends, put links into a menu and write the schema of a newer Grafana."""
    panels = [panel for panel in board["panels"] if panel["type"] == "timeseries"]
    assert all(panel["options"]["legend"]["showLegend"] for panel in panels)
    assert not [link for panel in (board, *board["panels"]) for link in panel.get("links", ()) if "placement" in link]
    assert board["schemaVersion"] == 41
    assert "grafana/grafana:12.1." in (ROOT / "docker-compose.yml").read_text(), "look which schema it reads"
