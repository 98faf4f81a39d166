"""docs/runbooks/README.md says of every alert how it was rehearsed, and that is what the tests do."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from tests.support.deploy.prometheus_kit import LEAST_AGE, LEAST_FOR, LEAST_WINDOW, RULES, faster
from tests.unit.deploy.test_alerts import OVERVIEW, ROOT, alerts


def rows(chapter: str) -> list[list[str]]:
    """Return the rows of the table in a chapter, without its header."""
    text = OVERVIEW.read_text().partition(f"## {chapter}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> frozenset[str]:
    return frozenset(re.findall(r"`(Penstock\w+)`", cell))


def rehearsed_alerts() -> set[frozenset[str]]:
    """The alerts that the tests wait for: at ``world.fires(…)``."""
    alerts = set()
    for file in Path(ROOT / "tests/e2e").glob("test_prometheus*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fires":
                alerts.add(
                    frozenset(str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))
                )
    return alerts - {frozenset()}


def test_the_runbooks_table_of_faults_lists_the_alerts_that_the_tests_expect() -> None:
    alert_names = [names(fires) for _, fires, _ in rows("What fires when something breaks")]
    assert set(alert_names) == rehearsed_alerts()
    assert len(alert_names) == len(set(alert_names))


def test_every_alert_is_rehearsed_by_a_test_or_says_why_not() -> None:
    seen = frozenset().union(*rehearsed_alerts())
    reasons = {}
    for alert, severity, runbook, how in rows("Every alert"):
        [name] = names(alert)
        reasons[name] = (severity, runbook)
        assert (how == "yes") == (name in seen), name
        assert how == "yes" or re.match(r"no: \w.{10}", how), name
    assert reasons == {
        alert["alert"]: (
            alert["labels"]["severity"],
            "[{0}]({0}.md)".format(Path(alert["annotations"]["runbook_url"]).stem),
        )
        for alert in alerts()
    }


def test_the_rehearsals_shorten_every_duration_window_and_age_of_the_rules() -> None:
    text = (RULES / "alerts.yml").read_text()
    hastened = [rule for group in yaml.safe_load(faster(text))["groups"] for rule in group["rules"]]
    assert [rule["alert"] for rule in hastened] == [alert["alert"] for alert in alerts()]
    for slow, fast in zip(alerts(), hastened, strict=True):
        assert not re.search(r"\[\d+[mhd]\]", fast["expr"])
        assert int(fast.get("for", "4s")[:-1]) >= LEAST_FOR
        assert all(int(window) >= LEAST_WINDOW for window in re.findall(r"\[(\d+)s\]", fast["expr"]))
        ages = [int(age) for age in re.findall(r"_seconds.* > (\d{2,})$", slow["expr"], re.M)]
        then = [int(age) for age in re.findall(r"_seconds.* > (\d{2,})$", fast["expr"], re.M)]
        assert all(age > least >= LEAST_AGE for age, least in zip(ages, then, strict=True)), slow["alert"]
