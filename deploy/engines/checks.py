"""Checks of the image and of the running services. Each check returns a detail, or raises CheckFailed."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from deploy.engines import images
from deploy.engines.engine import Engine
from deploy.engines.stack import CHECKOUT, DOCUMENTS_LATER, LATER, TAG, Stack, last_line, service_of
from deploy.report import CheckFailed, LeftOut, Report

BUILD_SECONDS, HEALTHY_SECONDS, DEMO_SECONDS = 900.0, 480.0, 300.0
LARGEST_WITH_MODEL, LARGEST_WITHOUT_MODEL = 700_000_000, 400_000_000
QUESTION = "how is a revoked permission withdrawn?"
PROBE = Path(__file__).with_name("probe.py")
USERS = {"10001": "penstock", "10002": "extraction"}


def build(stack: Stack) -> str:
    stack.run("build", seconds=BUILD_SECONDS)
    return "deploy/Dockerfile, LOCAL_MODEL=yes"


def size(engine: Engine, image: str, largest: int) -> str:
    measured = images.bytes_of(engine, image)
    detail = f"{measured / 1e6:.0f} MB, at most {largest / 1e6:.0f}"
    if measured > largest:
        raise CheckFailed(detail)
    return detail


def build_without_model(engine: Engine, image: str, *, stand_ins: bool) -> str:
    arguments = ["LOCAL_MODEL=no", *([f"PYTHON={images.PYTHON_TAG}"] if stand_ins else [])]
    done = engine.run(
        *("docker", "build", "--quiet", "--network=host", f"--file={CHECKOUT}/deploy/Dockerfile"),
        *(f"--build-arg={argument}" for argument in arguments),
        *(f"--tag={image}", CHECKOUT),
        seconds=BUILD_SECONDS,
    )
    if done.returncode != 0:
        raise CheckFailed(f"the build failed: {last_line(done.stderr)}")
    return size(engine, image, LARGEST_WITHOUT_MODEL)


def all(report: Report, stack: Stack, services: Mapping[str, Mapping[str, Any]], key: str) -> None:
    run = report.run
    run("docker compose up: everything healthy", lambda: up(stack, services), needed=True)
    for name in stack.left_out:
        run(name, partial(leave_out, services[name]["image"]))
    run("users, capabilities, seccomp, read-only roots", lambda: confinement(stack, services))
    run("TLS, logins and rights of the query service", lambda: rights(stack))
    run("demo profile", lambda: demo(stack))
    run("search over HTTP", lambda: search(stack, key))
    run("search by docker compose exec", lambda: search_by_exec(stack))
    run("Prometheus sees every process", lambda: prometheus(stack))
    run("vectors scaled to two", lambda: scale(stack))
    run("a killed worker comes back, and work goes on", lambda: kill(stack, key))
    run("shutdown", lambda: shutdown(stack))


def up(stack: Stack, services: Mapping[str, Mapping[str, Any]]) -> str:
    started = [name for name, service in services.items() if name not in stack.left_out and not service.get("profiles")]
    try:
        stack.run("up", "--detach", "--no-build", *started, seconds=HEALTHY_SECONDS)
        count = stack.wait_until_healthy(HEALTHY_SECONDS)
    except CheckFailed as error:
        waiting = stack.explain()
        raise CheckFailed(f"{error}: {waiting}") from error
    return f"{count} containers, {sum('healthcheck' in services[name] for name in started)} with a health check"


def leave_out(image: str) -> str:
    raise LeftOut(f"no registry answers, and there is no stand-in for {images.repository(image)}")


def confinement(stack: Stack, services: Mapping[str, Mapping[str, Any]]) -> str:
    """Compare what the kernel reports of the first process of each running container of ours."""
    looked = 0
    for container in stack.containers():
        name = service_of(container)
        if "build" not in services[name] or not container["State"]["Running"]:
            continue
        script = "cat /proc/1/status; touch /etc/probe 2>/dev/null && echo Writable: yes"
        text = stack.docker("exec", container["Id"], "sh", "-c", f"{script} || true")
        status = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        expected = {"CapEff": "0000000000000000", "CapBnd": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2"}
        wrong = [
            f"{field} {status[field].strip()}" for field, value in expected.items() if status[field].strip() != value
        ]
        if status["Uid"].split()[0] not in USERS:
            wrong.append(f"user {status['Uid'].split()[0]}")
        if "Writable" in status:
            wrong.append("its root can be written")
        if wrong:
            raise CheckFailed(f"{name}: {', '.join(wrong)}")
        looked += 1
    if looked == 0:
        raise CheckFailed("no container of ours runs")
    return f"{looked} containers"


def rights(stack: Stack) -> str:
    wrong = json.loads(stack.run("exec", "-T", "query", "python", "-", seconds=60, send=PROBE.read_text()))
    if wrong:
        raise CheckFailed("; ".join(wrong))
    return "nothing without TLS; may not delete, create an index or publish"


def demo(stack: Stack) -> str:
    output = stack.run("--profile=demo", "run", "--rm", "-T", "demo", seconds=DEMO_SECONDS)
    if re.search(r"skipped [1-9]", output):
        raise CheckFailed(f"files were skipped: {' '.join(output.split())[:200]}")
    return last_line(output)


def search(stack: Stack, key: str) -> str:
    refused, _ = stack.search(QUESTION, None)
    if refused != 401:
        raise CheckFailed(f"without a key the answer is {refused}, not 401")
    status, answer = stack.search(QUESTION, key)
    if status != 200 or not answer["results"]:
        raise CheckFailed(f"{status}: {str(answer)[:200]}")
    return f"{len(answer['results'])} results, the first from {answer['results'][0]['title']!r}; 401 without a key"


def search_by_exec(stack: Stack) -> str:
    output = stack.run("exec", "-T", "query", "penstock", "search", QUESTION, f"--tag={TAG}", "--json", seconds=60)
    results = json.loads(output)["results"]
    if not results:
        raise CheckFailed("nothing was found")
    return f"{len(results)} results, the first from {results[0]['title']!r}"


def prometheus(stack: Stack) -> str:
    """Every target is up; a new one is scraped within half a minute."""
    if "prometheus" in stack.left_out:
        raise LeftOut("Prometheus does not run")
    deadline = time.monotonic() + 60
    while True:
        output = stack.run(
            *("exec", "-T", "prometheus", "promtool", "query", "instant", "http://127.0.0.1:9090", "up"), seconds=60
        )
        lines = [line for line in output.splitlines() if line.startswith("up{")]
        down = [line for line in lines if " => 1 " not in line]
        if lines and not down:
            return f"{len(lines)} targets up"
        if time.monotonic() > deadline:
            raise CheckFailed(f"not up: {'; '.join(down)[:300] or 'no target'}")
        time.sleep(2)


def scale(stack: Stack) -> str:
    stack.run("up", "--detach", "--no-build", "--no-recreate", "--scale=vectors=2", "vectors", seconds=120)
    stack.wait_until_healthy(120)
    count = sum(service_of(container) == "vectors" for container in stack.containers())
    if count != 2:
        raise CheckFailed(f"{count} containers of vectors")
    return "two workers healthy"


def kill(stack: Stack, key: str) -> str:
    """Documents are published; one of the two vectors workers is killed meanwhile. All documents become searchable,
    and the engine starts the worker again."""
    output: list[str | CheckFailed] = []

    def publish() -> None:
        command = ["ingest", LATER, f"--acl={TAG}", "--wait", "--timeout=120"]
        mount = f"--volume={LATER}:{LATER}:ro"
        try:
            output.append(stack.run("--profile=demo", "run", "--rm", "-T", mount, "demo", *command, seconds=180))
        except CheckFailed as error:
            output.append(error)

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        time.sleep(4)
        victim = next(c for c in stack.containers() if service_of(c) == "vectors" and c["State"]["Running"])
        stack.kill(victim)
        deadline = time.monotonic() + 90
        while True:
            [again] = json.loads(stack.docker("inspect", victim["Id"]))
            if again["RestartCount"] > victim["RestartCount"] and again["State"]["Running"]:
                break
            if time.monotonic() > deadline:
                raise CheckFailed("the engine did not start the killed worker again")
            time.sleep(0.5)
    finally:
        publishing.join()
    [outcome] = output
    if isinstance(outcome, CheckFailed):
        raise outcome
    stack.wait_until_healthy(120)
    status, answer = stack.search("which locker is in the north corridor?", key)
    if status != 200 or "Locker" not in json.dumps(answer):
        raise CheckFailed(f"the new documents are not found: {status}")
    return f"{DOCUMENTS_LATER} documents searchable; the worker was restarted and is healthy"


def shutdown(stack: Stack) -> str:
    """Every container ends by itself within its grace period; nothing is left, volumes neither."""
    stack.run("--profile=demo", "stop", seconds=180)
    killed = [service_of(container) for container in stack.containers() if container["State"]["ExitCode"] == 137]
    if killed:
        raise CheckFailed(f"did not end in time and were killed: {', '.join(killed)}")
    stack.run("--profile=demo", "down", "--volumes", seconds=120)
    left = stack.docker("ps", "--all", "--quiet") + stack.docker("volume", "ls", "--quiet", "--filter=name=penstock_")
    if left.split():
        raise CheckFailed(f"containers or volumes are left: {len(left.split())}")
    return "no container was killed, nothing is left"
