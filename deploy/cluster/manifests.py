"""Everything that can be deployed, rendered by kustomize and by Helm, and compared object by object."""

from __future__ import annotations

import copy
import difflib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.cluster import programs
from deploy.helm.source import CHART, DEPLOY, KUBERNETES, Object, containers, template_of
from pipeline.core.errors import Misconfigured

NAMESPACE = "penstock"
RENDER_SECONDS = 60
EVERY_COMPONENT = {
    "kafkaRights": {"usersSecret": "penstock-kafka-users"},
    "traces": {"enabled": True},
    "alerting": {"enabled": True},
    "trailVerify": {"enabled": True},
    "ciliumNames": {"enabled": True},
}
"""The values that switch on what the commented lines of the example overlay do."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The objects of one way to deploy."""

    name: str
    text: str

    @property
    def objects(self) -> list[Object]:
        return [o for o in yaml.safe_load_all(self.text) if o]


def kustomized(folder: Path, name: str) -> Rendered:
    return Rendered(name, run([str(programs.require("kubectl")), "kustomize", str(folder)]))


def every_component(scratch: Path) -> Rendered:
    """The overlay for production with every component, as an operator has it who removes all comment signs."""
    for folder in ("kubernetes", "roles"):
        shutil.copytree(DEPLOY / folder, scratch / folder, dirs_exist_ok=True)
    overlay = scratch / "kubernetes/overlays/production"
    kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    listed = kustomization["components"]
    others = (f"../../components/{folder.name}" for folder in sorted((KUBERNETES / "components").iterdir()))
    kustomization["components"] = [*listed, *(other for other in others if other not in listed)]
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return kustomized(overlay, "overlay production, every component")


def charted(name: str, *options: str) -> Rendered:
    helm = [str(programs.require("helm")), "template", "penstock", str(CHART), "--namespace", NAMESPACE]
    return Rendered(name, run([*helm, *options]))


def values_file(scratch: Path) -> Path:
    """A file of values with EVERY_COMPONENT."""
    path = scratch / "every-component.yaml"
    path.write_text(yaml.safe_dump(EVERY_COMPONENT))
    return path


def pairs(scratch: Path) -> Iterator[tuple[Rendered, Rendered]]:
    """Render each way to deploy, by kustomize and by Helm."""
    production = ("--values", str(CHART / "production-values.yaml"))
    yield kustomized(KUBERNETES / "base", "base"), charted("chart")
    yield (
        kustomized(KUBERNETES / "overlays/production", "overlay production"),
        charted("chart, production", *production),
    )
    everything = (*production, "--values", str(values_file(scratch)))
    yield every_component(scratch), charted("chart, every component", *everything)


def differences(one: list[Object], other: list[Object]) -> list[str]:
    """One line for each object that only one of the lists has, or that differs. The order of objects, volumes and
    mounts has no meaning, and Helm leaves the namespace to the installation."""
    left, right = ({(o["kind"], o["metadata"]["name"]): _normal(o) for o in objects} for objects in (one, other))
    results = [f"{kind} {name}: only in one of them" for kind, name in sorted(left.keys() ^ right.keys())]
    for key in sorted(left.keys() & right.keys()):
        if left[key] != right[key]:
            before, after = (yaml.safe_dump(side[key]).splitlines() for side in (left, right))
            lines = difflib.unified_diff(before, after, n=0)
            changes = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
            results.append(f"{' '.join(key)}: {' | '.join(changes[:4])}")
    return results


def _normal(value: Any) -> Any:
    if isinstance(value, list):
        return [_normal(item) for item in value]
    if not isinstance(value, dict):
        return value
    normal = {key: _normal(item) for key, item in value.items() if (key, item) != ("namespace", NAMESPACE)}
    for key in ("volumes", "volumeMounts"):
        if isinstance(normal.get(key), list):
            normal[key].sort(key=lambda item: (item["name"], item.get("mountPath", "")))
    return normal


def pods(objects: list[Object]) -> list[Object]:
    """A Pod for each template of a pod: Pod Security refuses pods, but only warns of what would make them."""
    results = []
    for o in objects:
        template = template_of(o)
        if template is not None:
            metadata = {**template.get("metadata", {}), "name": o["metadata"]["name"]}
            spec = {"restartPolicy": "Always", **template["spec"]}
            claims = [claim["metadata"]["name"] for claim in o["spec"].get("volumeClaimTemplates", ())]
            spec["volumes"] = [*spec.get("volumes", ()), *({"name": name, "emptyDir": {}} for name in claims)]
            results.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return results


def images(objects: list[Object]) -> list[str]:
    """Every image of the containers of these objects."""
    templates = filter(None, map(template_of, objects))
    return [container["image"] for template in templates for container in containers(template["spec"])]


def misspelt(objects: list[Object], kind: str, old: str, new: str) -> Object:
    """The first object of a kind that has a field of this name, with the first such field renamed."""
    for o in objects:
        if o["kind"] == kind:
            changed = copy.deepcopy(o)
            if _rename(changed, old, new):
                return changed
    raise AssertionError(f"no {kind} has {old}")


def _rename(value: Any, old: str, new: str) -> bool:
    if isinstance(value, list):
        return any(_rename(item, old, new) for item in value)
    if not isinstance(value, dict):
        return False
    if old in value:
        value[new] = value.pop(old)
        return True
    return any(_rename(item, old, new) for item in value.values())


def run(command: list[str]) -> str:
    """Run a program that renders. Returns its output. Raises Misconfigured with what it complains of."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=RENDER_SECONDS
    )
    if done.returncode != 0:
        raise Misconfigured(f"{Path(command[0]).name} {command[1]}: {' '.join(done.stderr.split())[:500]}")
    return done.stdout
