"""The images that docker-compose.yml names: pulled where a registry answers, otherwise stand-ins built here.

A stand-in has the same server at the same paths, under the same user, with an entry point of ours that does what the
compose file relies on. It does not prove the vendor's own entry point and packaging.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.engines.debian import base_archive
from deploy.engines.engine import Engine
from deploy.local import dist, elasticsearch_users, postgres_tls
from deploy.report import CheckFailed

HERE = Path(__file__).parent
BASE = "penstock-stand-in/base"
PYTHON_TAG = "stand-in"
"""Tag of the base image ``python`` in deploy/Dockerfile."""
PULL_SECONDS, BUILD_SECONDS = 600, 900


@dataclass(frozen=True, slots=True)
class StandIn:
    """Its folder beside this file, and the build contexts that it copies from: name → folder inside the engine."""

    folder: str
    contexts: Mapping[str, str] = field(default_factory=dict)

    @property
    def image(self) -> str:
        return f"penstock-stand-in/{self.folder}"


JAVA = {"java": "/servers/java"}
STAND_INS = {
    "pgvector/pgvector": StandIn("postgres", {"server": "/servers/postgres"}),
    "apache/kafka": StandIn("kafka", {"server": "/servers/kafka", **JAVA}),
    "elasticsearch": StandIn("elasticsearch", {"server": "/servers/elasticsearch", **JAVA}),
    "prom/prometheus": StandIn("prometheus"),
    "prom/alertmanager": StandIn("alertmanager"),
}
"""By repository. Services of any other image are left out."""


def mounts(folder: Path) -> dict[str, Path]:
    """Folders of this machine that stand-ins are built from, by their path inside the engine. Raises Misconfigured."""
    return {
        "/servers/postgres": postgres_tls.require().parent,
        "/servers/kafka": dist.servers() / "kafka",
        "/servers/java": dist.java().parent.parent,
        "/servers/elasticsearch": elasticsearch_users.require(),
        "/stand-ins": HERE / "stand_ins",
        "/base": base_archive(folder).parent,
    }


def repository(image: str) -> str:
    return image.partition("@")[0].rpartition(":")[0]


def third_party(services: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Image with tag and digest → its repository, of all services that are not built from deploy/Dockerfile."""
    images = sorted({str(service["image"]) for service in services.values() if "build" not in service})
    return {image: repository(image) for image in images}


def registry_answers(engine: Engine, image: str) -> bool:
    try:
        return engine.run("docker", "pull", "--quiet", image, seconds=120).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def pull(engine: Engine, images: Iterable[str]) -> None:
    """Raises CheckFailed."""
    for image in images:
        _succeed(engine, f"pulling {image}", "docker", "pull", "--quiet", image, seconds=PULL_SECONDS)


def build_stand_ins(engine: Engine, repositories: Iterable[str], archive: Path) -> None:
    """The base image, and a stand-in for each repository that has one. Raises CheckFailed."""
    imported = f"{BASE}:{archive.stem.lower()}"
    if engine.run("docker", "image", "inspect", imported, seconds=60).returncode != 0:
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        _succeed(
            *(engine, "importing the base image", "docker", "import", "--change", f"ENV {path}"),
            *("--change", 'CMD ["python3"]', f"/base/{archive.name}", imported),
            seconds=BUILD_SECONDS,
        )
    for name in (f"{BASE}:latest", f"python:{PYTHON_TAG}"):
        _succeed(engine, "naming the base image", "docker", "tag", imported, name, seconds=60)
    for name in repositories:
        if (stand_in := STAND_INS.get(name)) is not None:
            contexts = [f"--build-context={context}={path}" for context, path in stand_in.contexts.items()]
            command = ["docker", "build", "--quiet", "--network=host", *contexts, "--tag", stand_in.image]
            what = f"building the stand-in of {name}"
            _succeed(engine, what, *command, f"/stand-ins/{stand_in.folder}", seconds=BUILD_SECONDS)


def override(services: Mapping[str, Mapping[str, Any]], *, stand_ins: bool) -> dict[str, Any]:
    """A compose file to be merged with docker-compose.yml: builds use the machine's network, and with stand-ins
    services use these, and the base image of the same kind."""
    changed: dict[str, Any] = {}
    for name, service in services.items():
        if "build" in service:
            arguments = {"args": {"PYTHON": PYTHON_TAG}} if stand_ins else {}
            changed[name] = {"build": {"network": "host", **arguments}}
        elif stand_ins and (stand_in := STAND_INS.get(repository(str(service["image"])))) is not None:
            changed[name] = {"image": stand_in.image, "pull_policy": "never"}
    return {"services": changed}


def left_out(services: Mapping[str, Mapping[str, Any]], *, stand_ins: bool) -> list[str]:
    """Services that cannot be started, because there is no stand-in for their image."""
    without = [
        name
        for name, service in services.items()
        if "build" not in service and repository(str(service["image"])) not in STAND_INS
    ]
    return without if stand_ins else []


def bytes_of(engine: Engine, image: str) -> int:
    """The size of an image, as ``docker images`` shows it. Raises CheckFailed."""
    command = ["docker", "image", "inspect", "--format", "{{.Size}}", image]
    return int(_succeed(engine, f"measuring {image}", *command, seconds=60))


def _succeed(engine: Engine, what: str, *command: str, seconds: float) -> str:
    try:
        done = engine.run(*command, seconds=seconds)
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"{what} took more than {seconds} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise CheckFailed(f"{what} failed: {lines[-1][:300]}")
    return done.stdout.strip()
