"""A real Alertmanager with our configuration, in which time runs faster, and its receivers."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deploy.alertmanager.config import config
from deploy.alertmanager.settings import AlertingSettings
from deploy.local import prometheus
from deploy.local.service import free_port
from tests.fakes.notifications import FakeReceiver
from tests.support.deploy.prometheus_kit import FASTER, UNITS, started

SHORTEST_SECONDS = 2
"""The shortest interval of Alertmanager here. It is longer than the tests' Prometheus needs to evaluate its rules once,
so that a cause arrives with what follows from it."""


def faster_routes(written: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with shorter intervals."""

    def shortened(match: re.Match[str]) -> str:
        return f'"{max(SHORTEST_SECONDS, int(match[1]) * UNITS[match[2]] // FASTER)}s"'

    results: dict[str, Any] = json.loads(re.sub(r'"(\d+)([smhd])"', shortened, json.dumps(written)))
    return results


@dataclass
class Alertmanager:
    address: str
    """Host and port."""
    client: httpx.AsyncClient

    async def states(self) -> dict[str, str]:
        """Return the state of each alert: active, or suppressed (inhibited)."""
        body = (await self.client.get("/api/v2/alerts")).json()
        return {alert["labels"]["alertname"]: alert["status"]["state"] for alert in body}


@asynccontextmanager
async def alertmanager(folder: Path, settings: AlertingSettings) -> AsyncIterator[Alertmanager]:
    folder.mkdir()
    file = folder / "alertmanager.json"
    file.write_text(json.dumps(faster_routes(config(settings))))
    address = f"127.0.0.1:{free_port()}"
    options = (f"--config.file={file}", f"--storage.path={folder / 'data'}", "--cluster.listen-address=")
    cwd = prometheus.run_folder("alertmanager")
    async with started("alertmanager", *options, address=address, log=folder / "log", cwd=cwd) as client:
        yield Alertmanager(address, client)


def webhooks(receiver: FakeReceiver, **more: Any) -> AlertingSettings:
    return AlertingSettings(
        page_webhook_url=receiver.url("page"),
        ticket_webhook_url=receiver.url("ticket"),
        **more,
    )
