"""Rules, dashboards and runbooks belong together: what one names, the other has."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command

from cli.main import app
from deploy.local import prometheus
from deploy.prometheus import catalogue

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RUNBOOKS = ROOT / "docs" / "runbooks"
OVERVIEW = RUNBOOKS / "README.md"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
OF_KUBERNETES = {"kube_job_status_failed", "kube_cronjob_status_last_successful_time"}
"""By kube-state-metrics."""
CHAPTERS = (
    "What it means",
    "Who is affected",
    "First three commands",
    "How to fix it",
    "How to see that it is fixed",
)


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        [prometheus.require("promtool"), *arguments], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def alerts() -> Sequence[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@cache
def existing_metrics() -> Set[str]:
    return catalogue.names()


@cache
def alert_tests() -> Sequence[dict[str, Any]]:
    files = (PROMETHEUS / "tests").glob("*.yml")
    return [test for file in files for test in yaml.safe_load(file.read_text())["tests"]]


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            yield f"{file.stem}: {panel['title']}", panel


def expressions() -> Iterator[tuple[str, str]]:
    for alert in alerts():
        yield alert["alert"], alert["expr"]
    for title, panel in panels():
        for target in panel.get("targets", ()):
            yield title, filled(target["expr"])


def filled(expression: str) -> str:
    """As Grafana sends it."""
    return expression.replace("$__rate_interval", "1m").replace("$source", ".*")


def named(expression: str) -> set[str]:
    """Series that an expression asks for."""
    return set(re.findall(r"\b(penstock[\w:]*|kube_\w+|up|ALERTS)\b", re.sub(r'"[^"]*"', '""', expression)))


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", PROMETHEUS / "recording.yml", PROMETHEUS / "alerts.yml")


@pytest.mark.parametrize("name", ["prometheus.yml", "local.yml"])
def test_promtool_accepts_the_configuration(name: str, tmp_path: Path) -> None:
    text = (PROMETHEUS / name).read_text()
    (tmp_path / "key").write_text("key")
    for file in ("recording.yml", "alerts.yml"):
        (tmp_path / file).write_text((PROMETHEUS / file).read_text())
    (tmp_path / "targets.json").write_text("[]")
    (tmp_path / name).write_text(text.replace("/run/secrets/operator_key", str(tmp_path / "key")))
    promtool("check", "config", tmp_path / name)


def rules() -> dict[str, dict[str, Any]]:
    """Every alert and recorded series by its name."""
    files = [yaml.safe_load((PROMETHEUS / name).read_text()) for name in ("recording.yml", "alerts.yml")]
    every = [rule for file in files for group in file["groups"] for rule in group["rules"]]
    return {rule.get("alert") or rule["record"]: rule for rule in every}


def needed(name: str, rules: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A rule after those whose series it reads, directly or not."""
    results: dict[str, dict[str, Any]] = {}
    for read in sorted(named(rules[name]["expr"]) & set(rules)):
        results |= needed(read, rules)
    return {**results, name: rules[name]}


@pytest.mark.heavy
def test_every_alert_fires_under_its_fault_and_clears(tmp_path: Path) -> None:
    """Each test of an alert is given the rules it needs and no others: promtool evaluates all that it is given every
    minute, which takes ten times as long."""
    every = rules()
    cases = []
    for file in sorted((PROMETHEUS / "tests").glob("*.yml")):
        tried = yaml.safe_load(file.read_text())
        for n, test in enumerate(tried["tests"]):
            own = tmp_path / f"{file.stem}-{n}.rules.yml"
            groups = [{"name": "needed", "rules": list(needed(test["name"], every).values())}]
            own.write_text(json.dumps({"groups": groups}))
            case = tmp_path / f"{file.stem}-{n}.test.yml"
            case.write_text(json.dumps({**tried, "rule_files": [own.name], "tests": [test]}))
            cases.append(case)
    promtool("test", "rules", *cases)


def test_every_alert_has_a_test_that_it_fires_and_clears() -> None:
    tried: dict[str, list[str]] = {}
    for test in alert_tests():
        for tests in test["promql_expr_test"]:
            assert f'alertname="{test["name"]}"' in tests["expr"]
            tried.setdefault(test["name"], []).append("fires" if tests["exp_samples"] else "clears")
    assert tried == {alert["alert"]: ["fires", "clears"] for alert in alerts()}


def checked_labels(name: str) -> set[str]:
    """The labels that the alert has when it fires, as its promtool test checks them."""
    tests = [test["promql_expr_test"][0]["expr"] for test in alert_tests() if test["name"] == name]
    return set(re.findall(r'(\w+)="[^"]+"', "".join(tests))) - {"alertname", "alertstate"}


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_the_promtool_test_checks_every_label_that_the_summary_shows(alert: dict[str, Any]) -> None:
    """`absent(…)` of an expression has no labels: a summary said "No process of  responds"."""
    shown = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    assert shown <= checked_labels(alert["alert"])


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_every_alert_has_a_severity_a_summary_and_a_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert alert["annotations"]["summary"]
    book = ROOT / alert["annotations"]["runbook_url"]
    assert book.parent == RUNBOOKS
    assert f"`{alert['alert']}`" in book.read_text()


@pytest.mark.parametrize("book", sorted(set(RUNBOOKS.glob("*.md")) - {OVERVIEW}), ids=lambda book: book.stem)
def test_every_runbook_has_all_chapters_and_valid_links_metrics_and_commands(book: Path) -> None:
    text = book.read_text()
    chapters = dict(re.findall(r"^## (.*?)\n\n(.*?)(?=\n## |\Z)", text, re.M | re.S))
    assert tuple(chapters) == CHAPTERS
    assert all(chapter.strip() for chapter in chapters.values())
    assert set(re.findall(r"`(Penstock\w+)`", text)) <= {alert["alert"] for alert in alerts()}
    assert any(book.name in alert["annotations"]["runbook_url"] for alert in alerts())
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (book.parent / link).exists(), link
    assert named("\n".join(re.findall(r"`(penstock[_:][^`]*)`", text))) <= existing_metrics()
    commands = chapters["First three commands"].strip().strip("`").strip().splitlines()
    assert len(commands) == 3
    for command in (*commands, *re.findall(r"`(penstock [a-z][^`]*)`", text)):
        assert exists(command), command


def exists(line: str) -> bool:
    """Whether we have the command, and its options."""
    program, *words = line.split()
    if program != "penstock":
        return program == "curl"
    command: Any = get_command(app)
    context = command.make_context("penstock", ["--help"], resilient_parsing=True)
    while words and isinstance(command, typer.core.TyperGroup) and not words[0].startswith("-"):
        command = command.get_command(context, words.pop(0))
        if command is None:
            return False
    options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    return all(word in options for word in words if word.startswith("--"))


def test_promtool_accepts_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"tried:n{n}", "expr": expression} for n, (_, expression) in enumerate(expressions())]
    (tmp_path / "all.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "all.yml")


def test_every_expression_names_only_existing_metrics() -> None:
    for where, expression in expressions():
        assert named(expression), where
        assert named(expression) <= existing_metrics() | OF_KUBERNETES, where


def test_a_metric_that_does_not_exist_is_detected() -> None:
    assert named('sum(rate(penstock_typo_total{job="penstock"}[5m]))') == {"penstock_typo_total"}
    assert not named('sum(rate(penstock_typo_total{job="penstock"}[5m]))') <= existing_metrics()
