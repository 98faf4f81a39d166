"""Alertmanager's configuration fits the alerts, and the settings reach its receivers."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.alertmanager.config import INHIBITIONS, Alerts, config
from deploy.alertmanager.settings import AlertingSettings
from deploy.local import prometheus
from pipeline.runtime.credentials import SECRETS_DIR
from tests.support.space import PROJECT
from tests.unit.deploy.test_alerts import alerts, checked_labels
from tests.unit.deploy.test_alerts_rehearsed import names, rows

SEVERITY = {alert["alert"]: alert["labels"]["severity"] for alert in alerts()}
EVERYTHING = {
    "PENSTOCK_ALERTING_PAGE_WEBHOOK_URL": "https://pages.example.com/k3y",
    "PENSTOCK_ALERTING_TICKET_WEBHOOK_URL": "https://tickets.example.com/k3y",
    "PENSTOCK_ALERTING_PAGE_MAIL_TO": "ann@example.com, ben@example.com",
    "PENSTOCK_ALERTING_TICKET_MAIL_TO": "team@example.com",
    "PENSTOCK_ALERTING_MAIL_FROM": "penstock@example.com",
    "PENSTOCK_ALERTING_SMTP_SERVER": "mail.example.com:587",
    "PENSTOCK_ALERTING_SMTP_USERNAME": "penstock",
    "PENSTOCK_ALERTING_SMTP_PASSWORD": "p4ss: 'word'",
}


def amtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        [prometheus.require("amtool"), *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.alertmanager", str(folder / "alertmanager.json")],
        env={"PENSTOCK_HOME": str(folder), **environment},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    file = tmp_path / "alertmanager.json"
    file.write_text(json.dumps(config(AlertingSettings())))
    return file


def test_amtool_accepts_the_configuration_without_receivers(written: Path) -> None:
    amtool("check-config", written)


def test_amtool_accepts_the_configuration_with_webhooks_and_mail_from_secret_files(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name, value in EVERYTHING.items():
        (secrets / name).write_text(f"{value}\n")
    done = write(tmp_path, {SECRETS_DIR: str(secrets)})
    assert done.stdout == "page: webhook, email\nticket: webhook, email\n", done.stderr
    file = tmp_path / "alertmanager.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o400
    amtool("check-config", file)
    results = json.loads(file.read_text())
    assert results["global"]["smtp_auth_password"] == EVERYTHING["PENSTOCK_ALERTING_SMTP_PASSWORD"]
    assert [receiver["webhook_configs"][0]["url"] for receiver in results["receivers"]] == [
        "https://pages.example.com/k3y",
        "https://tickets.example.com/k3y",
    ]


def test_empty_settings_are_unset_because_a_secret_file_may_be_empty(tmp_path: Path) -> None:
    done = write(tmp_path, dict.fromkeys(EVERYTHING, "") | {"PENSTOCK_ALERTING_SMTP_REQUIRE_TLS": ""})
    assert done.stdout.splitlines() == [
        "page: nobody is notified; the alerts are only shown",
        "ticket: nobody is notified; the alerts are only shown",
    ], done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"PENSTOCK_ALERTING_PAGE_WEBHOOK_URL": "s3cret"}, "PENSTOCK_ALERTING_PAGE_WEBHOOK_URL: is no http"),
        ({"PENSTOCK_ALERTING_TICKET_WEBHOOK_URL": "file:///s3cret"}, "TICKET_WEBHOOK_URL: is no http"),
        ({"PENSTOCK_ALERTING_SMTP_SERVER": "s3cret"}, "PENSTOCK_ALERTING_SMTP_SERVER: has to be HOST:PORT"),
        ({"PENSTOCK_ALERTING_SMTP_SERVER": ""}, "mail needs PENSTOCK_ALERTING_SMTP_SERVER"),
        ({"PENSTOCK_ALERTING_SMTP_PASSWORD": ""}, "PENSTOCK_ALERTING_SMTP_USERNAME and _SMTP_PASSWORD"),
    ],
)
def test_a_wrong_setting_is_named_and_its_value_is_not_shown(
    tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    done = write(tmp_path, EVERYTHING | changed)
    assert done.returncode == 1
    assert message in done.stderr
    assert "s3cret" not in done.stderr
    assert "k3y" not in done.stderr
    assert not (tmp_path / "alertmanager.json").exists()


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [*((f"severity={severity}", severity) for severity in sorted({*SEVERITY.values()})), ("severity=other", "page")],
)
def test_every_severity_has_its_receiver_and_an_unknown_one_pages(written: Path, labels: str, receiver: str) -> None:
    assert amtool("config", "routes", "test", f"--config.file={written}", labels).split() == [receiver]


def test_inhibitions_name_existing_alerts_with_labels_that_promtool_saw() -> None:
    for inhibition in INHIBITIONS:
        for side in (inhibition.cause, inhibition.follows):
            for name in side.names:
                assert {label for label, _ in side.labels} | set(inhibition.equal) <= checked_labels(name), name


def test_no_ticket_inhibits_a_page() -> None:
    """A ticket is read within working hours only."""
    for inhibition in INHIBITIONS:
        if "ticket" in {SEVERITY[name] for name in inhibition.cause.names}:
            assert {SEVERITY[name] for name in inhibition.follows.names} == {"ticket"}, inhibition


def test_no_alerts_inhibit_each_other() -> None:
    """An inhibited alert still inhibits others: of two that inhibit each other nobody would be notified."""
    follows: dict[str, set[str]] = {}
    for inhibition in INHIBITIONS:
        for cause in inhibition.cause.names:
            follows.setdefault(cause, set()).update(inhibition.follows.names)

    def reached(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, path
        for after in follows.get(name, ()):
            reached(after, (*path, name))

    for cause in follows:
        reached(cause, ())


def test_the_runbooks_table_lists_what_each_alert_inhibits() -> None:
    expected: dict[str, set[str]] = {}
    for inhibition in INHIBITIONS:
        for cause in inhibition.cause.names:
            expected.setdefault(cause, set()).update(inhibition.follows.names)
    listed = {cause: set(names(follows)) for causes, follows in rows("Who is notified") for cause in names(causes)}
    assert listed == expected


def test_matchers_are_anchored_expressions_and_equalities() -> None:
    side = Alerts(("PenstockA", "PenstockB"), (("store", "vectors"),))
    assert side.matchers == ['alertname=~"PenstockA|PenstockB"', 'store="vectors"']
    assert all(re.fullmatch(r"[\w|]+", name) for inhibition in INHIBITIONS for name in inhibition.cause.names)
