"""The real services, started once for the whole run and stopped with it."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from deploy.local import service
from deploy.local.elasticsearch import Elasticsearch
from deploy.local.postgres import Postgres
from deploy.local.service import SERIAL, Place
from deploy.local.stack import SERVERS, Stack
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores.postgres import migrate
from tests.faults.tcp_proxy import ProxiedKafka, proxy_ports
from tests.support.portion import portion
from tests.support.servers_state import servers_state
from tests.support.space import Space

LOG_SHOWN = 6_000
"""Characters of each worker's log with a failure: where the machine is gone when it is read, there is nothing else."""

_NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_COUNT = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
service.PORT_RANGE = service.PORT_RANGE[_NUMBER::_COUNT]
"""The share of this process of pytest: two of them would start servers on the same port at the same time."""

settings.register_profile(
    "penstock", max_examples=portion(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("penstock")  # no test fails because the machine is busy


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """The modules and tests stay until the end: the garbage collector need not look through them again and again,
    which takes a tenth of the time of the unit tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    space = getattr(item, "funcargs", {}).get("space")
    if report.failed and isinstance(space, Space):  # type: ignore[attr-defined]
        for log in sorted(space.home.glob("**/*.log")):
            report.sections.append((f"end of {log.name}", log.read_text(errors="replace")[-LOG_SHOWN:]))  # type: ignore[attr-defined]
    return report


class UnsyncedPostgres(Postgres):
    """Waits for no disk: the tests kill the server but never the machine, whose cache holds what was written. A new
    database has the tables of all migrations at once, unless it is made from ``template0``."""

    def more_settings(self, place: Place) -> dict[str, object]:
        return {"fsync": "off", "full_page_writes": "off"}

    def complete(self, place: Place, port: int) -> None:
        super().complete(place, port)
        template = make_conninfo(self.url(place, port), dbname="template1")
        asyncio.run(migrate(PostgresSettings(dsn=SecretStr(template))))


class BriefKafka(ProxiedKafka):
    """Lives for minutes beside two more of its kind: processor time matters, pauses do not."""

    collector = SERIAL


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of our own. PENSTOCK_TEST_HOME names a state folder whose running stack is used instead (for quick
    rounds while developing)."""
    if home := os.environ.get("PENSTOCK_TEST_HOME"):
        plain = Stack(Path(home))
        ports = proxy_ports(plain)
        yield (
            plain
            if ports is None
            else Stack(Path(home), servers={**SERVERS, ProxiedKafka.name: ProxiedKafka(ports[1])})
        )
        return
    own = (BriefKafka(), UnsyncedPostgres(), Elasticsearch())
    servers = {**SERVERS, **{server.name: server for server in own}}
    with servers_state(tmp_path_factory.mktemp("stack")) as folder:
        stack = Stack(folder / "home", die_with_parent=True, servers=servers)
        stack.up()
        try:
            yield stack
        finally:
            stack.down()


@pytest.fixture
async def space(stack: Stack, tmp_path: Path) -> AsyncIterator[Space]:
    """An empty Penstock of its own on the shared services: database, topics and index are this test's alone."""
    async with Space.create(stack, tmp_path) as space:
        yield space
