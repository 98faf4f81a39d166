"""``penstock up`` starts each worker as soon as what it needs is there, and stops everything when a part fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli import setup, stack
from deploy.local.starting import OnStep
from pipeline.core.errors import Misconfigured

SERVICES = ("postgres", "kafka", "elasticsearch")


class FakeStack:
    """A stack whose Elasticsearch answers when it is made to."""

    def __init__(self, home: Path, *, fails: str = "") -> None:
        """fails: the service or worker that does not start."""
        self.home = home
        self.names = list(SERVICES)
        self.elasticsearch_may_answer = threading.Event()
        self.done: list[str] = []
        self._fails = fails

    def is_new(self) -> bool:
        return False

    def is_prepared(self) -> bool:
        return False

    def endpoints(self) -> dict[str, dict[str, str]]:
        return {}

    def services(self) -> list[Any]:
        return [SimpleNamespace(ready=False) for _ in SERVICES]

    def workers(self) -> list[Any]:
        return [SimpleNamespace(name="all", ready=True)]

    def query(self) -> Any:
        return SimpleNamespace(ready=False)

    def up(self, _progress: object, *, on_step: OnStep) -> list[str]:
        for name in SERVICES:
            on_step(name, "known")
        for name in ("postgres", "kafka"):
            on_step(name, "ready")
        assert self.elasticsearch_may_answer.wait(5)
        if self._fails == "elasticsearch":
            raise Misconfigured("elasticsearch does not answer")
        on_step("elasticsearch", "ready")
        return list(SERVICES)

    def start_worker(self, name: str) -> None:
        if self._fails == name:
            self.elasticsearch_may_answer.set()
            raise Misconfigured(f"worker {name} stopped while starting")
        self.done.append(f"start {name}")
        if self._fails != "elasticsearch" or name == "vectors":
            self.elasticsearch_may_answer.set()

    def stop(self, name: str) -> None:
        self.done.append(f"stop {name}")

    def mark_prepared(self) -> None:
        self.done.append("prepared")


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def run(fake: FakeStack, *workers: str) -> list[str]:
        async def ledger(_settings: object) -> tuple[str, list[str]]:
            fake.done.append("ledger")
            return "g1", []

        async def topics(_settings: object) -> list[str]:
            fake.done.append("topics")
            return []

        async def indexes(_settings: object, generation: str) -> None:
            assert generation == "g1"
            fake.done.append("indexes")

        monkeypatch.setattr(setup, "prepare_ledger", ledger)
        monkeypatch.setattr(setup, "prepare_topics", topics)
        monkeypatch.setattr(setup, "prepare_indexes", indexes)
        any_stack: Any = fake
        return stack._up(any_stack, lambda _name, _what: None, workers)

    return run


def test_workers_start_while_elasticsearch_still_starts(tmp_path: Path, up: Callable[..., list[str]]) -> None:
    fake = FakeStack(tmp_path)
    assert sorted(up(fake, "detect")) == sorted([*SERVICES, "detect"])
    assert fake.done[0] == "stop all", "one process for all would do the same work again"
    assert set(fake.done[1:3]) == {"ledger", "topics"}
    assert fake.done[3:] == ["start detect", "indexes", "prepared"]


def test_workers_that_publish_start_after_the_indexes_are_made(tmp_path: Path, up: Callable[..., list[str]]) -> None:
    """The keywords worker was stalled for some seconds, because the first documents had no index."""
    fake = FakeStack(tmp_path)
    up(fake, "keywords", "connectors", "canary")
    indexes = fake.done.index("indexes")
    assert "start keywords" in fake.done[:indexes]
    assert {"start connectors", "start canary"} < set(fake.done[indexes:])


def test_a_worker_that_does_not_start_stops_everything(tmp_path: Path, up: Callable[..., list[str]]) -> None:
    fake = FakeStack(tmp_path, fails="vectors")
    with pytest.raises(Misconfigured, match="worker vectors"):
        up(fake, "vectors")
    assert {f"stop {name}" for name in (*SERVICES, "vectors")} <= set(fake.done)
    assert "prepared" not in fake.done


def test_a_service_that_does_not_start_stops_the_workers(tmp_path: Path, up: Callable[..., list[str]]) -> None:
    fake = FakeStack(tmp_path, fails="elasticsearch")
    with pytest.raises(Misconfigured, match="elasticsearch does not answer"):
        up(fake, "vectors")
    assert "stop vectors" in fake.done
    assert "indexes" not in fake.done


def test_the_stages_are_one_process_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stack._stages() == ("detect", "vectors", "keywords", "analysis")
    monkeypatch.setenv("PENSTOCK_WORKERS_TOGETHER", "true")
    assert stack._stages() == ("all",)


def test_a_recovery_stops_detect_also_where_it_shares_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    running = [SimpleNamespace(name=name, pid=1) for name in ("detect-1", "all", "vectors")]
    fake = SimpleNamespace(
        workers=lambda: running,
        stop=lambda name: done.append(f"stop {name}"),
        start_worker=lambda name, instance: done.append(f"start {name} {instance}"),
    )
    monkeypatch.setattr(stack, "local_stack", lambda: fake)
    with stack.local_detect_stopped(done.append) as start_again:
        assert done == ["detect-1: stopping", "stop detect-1", "all: stopping", "stop all"]
        done.clear()
        start_again()
    assert done == ["start all 0", "start detect 1"], "once"
