"""Alertmanager's configuration as a value: routes by severity, inhibition, receivers. Pure.

Names and labels are those of ``deploy/prometheus/alerts.yml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from deploy.alertmanager.settings import AlertingSettings


@dataclass(frozen=True, slots=True)
class Alerts:
    """Alerts by their names, and by the labels that they all have."""

    names: tuple[str, ...]
    labels: tuple[tuple[str, str], ...] = ()
    """Label and value."""

    @property
    def matchers(self) -> list[str]:
        return [f'alertname=~"{"|".join(self.names)}"', *(f'{label}="{value}"' for label, value in self.labels)]


def alerts(*names: str, **labels: str) -> Alerts:
    return Alerts(tuple(f"Penstock{name}" for name in names), tuple(labels.items()))


@dataclass(frozen=True, slots=True)
class Inhibition:
    """While ``cause`` fires, nobody is notified of what follows from it."""

    cause: Alerts
    follows: Alerts
    equal: tuple[str, ...] = ()
    """Labels that must have the same value in both."""


FRESHNESS = ("FreshnessBurnsFast", "FreshnessBurns", "FreshnessBurnsSlowly")
LATE = (*FRESHNESS, "CertificateOld")
"""The alerts that follow from whatever delays changes on their way to the stores."""
QUERY_ERRORS = ("QueryErrorsBurnsFast", "QueryErrorsBurns", "QueryErrorsBurnsSlowly")
LATENCY = ("SearchLatencyBurnsFast", "SearchLatencyBurns", "SearchLatencyBurnsSlowly")
WITHOUT_LEDGER = (
    *("OldestPending", "ConsumerLag", "CanaryLate", "CanaryIdle", *LATE, *QUERY_ERRORS, *LATENCY),
    *("ConnectorSilent", "AccessOld", "ConnectorNotWorking", "EvalStale", "AnalysisStuck"),
)
"""They follow from a ledger that cannot be read or written. ``TrailLost`` is missing: of that somebody has to know."""

INHIBITIONS = (
    *(
        Inhibition(cause, consequence)
        for cause in (alerts("Outage", service="postgres"), alerts("LedgerFenced"))
        for consequence in (alerts(*WITHOUT_LEDGER), alerts("BreakerOpen", service="postgres"))
    ),
    Inhibition(alerts("Outage", service="postgres"), alerts("VitalsMissing", "TrailNotWritten")),
    Inhibition(alerts("Outage", service="kafka"), alerts("CanaryLate", "ConnectorNotWorking", "AnalysisStuck", *LATE)),
    Inhibition(alerts("Outage", service="kafka"), alerts("BreakerOpen", service="kafka")),
    Inhibition(alerts("WorkerAbsent"), alerts("WorkerDown"), equal=("worker",)),
    Inhibition(
        alerts("WorkerAbsent", worker="detect"),
        alerts("VitalsMissing", "CanaryLate", "ConnectorSilent", *LATE),
    ),
    *(
        Inhibition(cause, consequence)
        for store in ("vectors", "keywords")
        for cause in (alerts("WorkerAbsent", worker=store), alerts("BreakerOpen", stage=store))
        for consequence in (
            alerts("OldestPending", "CanaryLate", store=store),
            alerts("ConsumerLag", stage=store),
            alerts(*LATE),
        )
    ),
    Inhibition(alerts("BreakerOpen", stage="detect"), alerts("CanaryLate", *LATE)),
    Inhibition(alerts("BreakerOpen", stage="detect"), alerts("ConsumerLag", stage="detect")),
    Inhibition(alerts("BreakerOpen", service="embedding"), alerts("AnswersDegraded", part="vectors")),
    Inhibition(alerts("BreakerOpen", service="elasticsearch"), alerts("AnswersDegraded", part="keywords")),
    Inhibition(
        alerts("ConnectorSilent"), alerts("AccessOld", "ConnectorNotWorking", "CertificateOld"), equal=("source",)
    ),
    Inhibition(alerts("ConnectorSilent"), alerts("WorkerDown", worker="connectors")),
    Inhibition(alerts("AccessOld"), alerts("ConnectorNotWorking", "CertificateOld"), equal=("source",)),
    Inhibition(alerts("CanaryAbsent"), alerts("WorkerDown", worker="canary")),
    Inhibition(alerts("DeadLetterFlood"), alerts("DeadLetters")),
    Inhibition(alerts("RerankFallback"), alerts("AnswersDegraded", part="rerank")),
    *(
        Inhibition(alerts(*faster), alerts(slower))
        for objective in (FRESHNESS, QUERY_ERRORS, LATENCY)
        for faster, slower in ((objective[:1], objective[1]), (objective[:2], objective[2]))
    ),
)
"""Causes and what follows from them. docs/runbooks/README.md lists them for operators, and a test compares."""


def config(settings: AlertingSettings) -> dict[str, Any]:
    """Alertmanager's configuration. Its JSON is valid YAML."""
    return {
        "global": _mail_server(settings),
        "route": {
            "receiver": "page",  # of an alert of somebody else's without one of our severities
            "group_by": ["alertname"],
            "group_wait": "30s",
            "group_interval": "5m",
            "repeat_interval": "4h",
            "routes": [
                {"matchers": ['severity="page"'], "receiver": "page"},
                {"matchers": ['severity="ticket"'], "receiver": "ticket", "group_wait": "5m", "repeat_interval": "24h"},
            ],
        },
        "inhibit_rules": [
            {
                "source_matchers": inhibition.cause.matchers,
                "target_matchers": inhibition.follows.matchers,
                "equal": list(inhibition.equal),
            }
            for inhibition in INHIBITIONS
        ],
        "receivers": [
            _receiver("page", settings.page_webhook_url, settings.page_mail_to),
            _receiver("ticket", settings.ticket_webhook_url, settings.ticket_mail_to),
        ],
    }


def _receiver(name: str, webhook_url: SecretStr | None, mail_to: str | None) -> dict[str, Any]:
    receiver: dict[str, Any] = {"name": name}
    if webhook_url is not None:
        receiver["webhook_configs"] = [{"url": webhook_url.get_secret_value(), "send_resolved": True}]
    if mail_to is not None:
        receiver["email_configs"] = [{"to": mail_to, "send_resolved": True}]
    return receiver


def _mail_server(settings: AlertingSettings) -> dict[str, Any]:
    if settings.smtp_server is None:
        return {}
    server: dict[str, Any] = {
        "smtp_smarthost": settings.smtp_server,
        "smtp_from": settings.mail_from,
        "smtp_require_tls": settings.smtp_require_tls,
    }
    if settings.smtp_username is not None and settings.smtp_password is not None:
        server["smtp_auth_username"] = settings.smtp_username
        server["smtp_auth_password"] = settings.smtp_password.get_secret_value()
    return server
