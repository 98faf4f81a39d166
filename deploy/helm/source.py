"""Reads the manifests of deploy/kubernetes as kustomize would render them: labels on every object, the grants as a
ConfigMap whose name ends with a hash of its content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import yaml

DEPLOY = Path(__file__).parent.parent
KUBERNETES, CHART = DEPLOY / "kubernetes", DEPLOY / "chart"
Object = dict[str, Any]
_DIGITS = str.maketrans("013ae", "ghkmt")
"""kustomize writes other letters for these hexadecimal digits, so that no word comes about by chance."""


def read(path: str) -> list[Any]:
    """The documents of a file of deploy/kubernetes, without kustomize's labels."""
    return list(yaml.safe_load_all((KUBERNETES / path).read_text()))


def labelled(path: str) -> list[Object]:
    """The objects of a file of deploy/kubernetes, with the labels that every kustomization there sets."""
    objects = read(path)
    for o in objects:
        _label(o)
        if o["kind"] == "CronJob":
            _label(o["spec"]["jobTemplate"])
        for claim in o.get("spec", {}).get("volumeClaimTemplates", ()):
            _label(claim)
        template = template_of(o)
        if template is not None:
            _label(template)
    return objects


def grants() -> Object:
    """The ConfigMap with the grants of Postgres, as the kustomization of deploy/roles generates it."""
    [generator] = yaml.safe_load((DEPLOY / "roles/kustomization.yaml").read_text())["configMapGenerator"]
    files = [DEPLOY / "roles" / name for name in generator["files"]]
    o: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generator["name"]},
        "data": {file.name: file.read_text() for file in files},
    }
    o["metadata"]["name"] += f"-{content_hash(o)}"
    _label(o)
    return o


def content_hash(o: Object) -> str:
    """kustomize's hash of a ConfigMap: ten digits of the SHA-256 of its kind and data as JSON of Go. (The name
    is part of it, but kustomize hashes an empty one.)"""
    content = {"data": o["data"], "kind": o["kind"], "name": ""}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return hashlib.sha256(text.encode()).hexdigest()[:10].translate(_DIGITS)


def template_of(o: Object) -> Object | None:
    """The pod template of an object; None where it has none."""
    kinds: dict[str, tuple[str, ...]] = {
        "Deployment": ("spec", "template"),
        "StatefulSet": ("spec", "template"),
        "Job": ("spec", "template"),
        "CronJob": ("spec", "jobTemplate", "spec", "template"),
    }
    path = kinds.get(o["kind"])
    if path is None:
        return None
    for key in path:
        o = o[key]
    return o


def containers(spec: Object, of: Literal["all", "main"] = "all") -> list[Object]:
    """The containers of a pod, those of its start first."""
    return [*(spec.get("initContainers", ()) if of == "all" else ()), *spec["containers"]]


def _label(o: Object) -> None:
    [labels] = yaml.safe_load((KUBERNETES / "base/kustomization.yaml").read_text())["labels"]
    metadata = o.setdefault("metadata", {})
    metadata["labels"] = {**metadata.get("labels", {}), **labels["pairs"]}
