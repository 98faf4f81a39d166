"""The checks of ``make cluster``. Each returns what it saw, or raises CheckFailed or Misconfigured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import yaml

from deploy.cluster import manifests, programs, score
from deploy.cluster.control_plane import Answer, ControlPlane
from deploy.cluster.manifests import NAMESPACE, Rendered
from deploy.helm.source import CHART, Object
from deploy.report import CheckFailed
from pipeline.core.errors import Misconfigured

RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
DEFINED_SECONDS = 30
MISSPELT = (
    ("Deployment", "readinessProbe", "readinessprobe"),
    ("NetworkPolicy", "podSelector", "podSelektor"),
    ("ScaledObject", "pollingInterval", "polingInterval"),
)
"""Kinds, a field of each, and what it becomes in the negative case."""
Check = tuple[str, Callable[[], str]]
"""The name of a check, and the check."""


def build(name: str) -> str:
    """Make a program ready."""
    cached = programs.find(name) is not None
    size = programs.require(name).stat().st_size >> 20
    return f"{'cached' if cached else 'built'}, {size} MiB"


def of_files(rendered: list[tuple[Rendered, Rendered]]) -> Iterator[Check]:
    """The checks that need no cluster."""
    for kustomized, charted in rendered:
        yield f"{charted.name}: the objects of {kustomized.name}", partial(_equal, kustomized, charted)
        yield f"{kustomized.name}: kube-score", partial(_scored, kustomized)
    yield "chart: lint", _linted
    yield "chart: an unknown value is refused", _refuses_unknown_value
    production = rendered[1][0]
    yield f"{production.name}: every image by digest", partial(_by_digest, production)


def of_cluster(plane: ControlPlane, rendered: list[Rendered]) -> Iterator[Check]:
    """The checks of the API server."""
    yield "namespace with Pod Security restricted", partial(_namespace, plane)
    yield "definitions of KEDA and Cilium", partial(_define, plane)
    for way in rendered:
        yield f"{way.name}: accepted", partial(_accepted, plane, way.objects)
        yield f"{way.name}: pods accepted", partial(_accepted, plane, manifests.pods(way.objects))
    objects = rendered[0].objects
    for kind, old, new in MISSPELT:
        wrong = manifests.misspelt(objects, kind, old, new)
        reasons = (f".{new}", "field not declared in schema")
        yield f"a misspelt field is refused: {kind}.{new}", partial(_refused, plane, wrong, *reasons)
    yield "a privileged pod is refused", partial(_refused, plane, _privileged(objects), "PodSecurity", "privileged")
    yield "helm installs, upgrades and removes the chart", partial(_install, plane)


def _linted() -> str:
    manifests.run([str(programs.require("helm")), "lint", "--strict", str(CHART)])
    return "clean"


def _equal(one: Rendered, other: Rendered) -> str:
    if different := manifests.differences(one.objects, other.objects):
        raise CheckFailed("; ".join(different))
    return f"{len(one.objects)} objects"


def _scored(rendered: Rendered) -> str:
    if complaints := score.findings(rendered.text):
        raise CheckFailed("; ".join(complaints))
    return f"nothing to improve, {len(score.IGNORED)} checks argued"


def _by_digest(rendered: Rendered) -> str:
    images = manifests.images(rendered.objects)
    if loose := sorted({image for image in images if "@sha256:" not in image}):
        raise CheckFailed(", ".join(loose))
    return f"{len(images)} containers"


def _refuses_unknown_value() -> str:
    try:
        manifests.charted("chart, unknown value", "--set", "image.digets=x")
    except Misconfigured as error:
        if "'digets' not allowed" in str(error):
            return "by its schema"
        raise
    raise CheckFailed("it rendered")


def _namespace(plane: ControlPlane) -> str:
    o = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}}
    _must(plane.kubectl("apply", "--filename=-", text=yaml.safe_dump(o)))
    return f"Kubernetes {programs.kubernetes_version()}"


def _define(plane: ControlPlane) -> str:
    files = programs.definitions()
    for path in files:
        _must(plane.kubectl("create", f"--filename={path}"))
    names = [yaml.safe_load(path.read_text())["metadata"]["name"] for path in files]
    for name in names:
        _must(plane.kubectl("wait", "--for=condition=Established", f"--timeout={DEFINED_SECONDS}s", f"crd/{name}"))
    return f"{len(names)} kinds"


def _apply(plane: ControlPlane, objects: list[Object]) -> Answer:
    """A dry run on the server, in which an unknown or a repeated field is an error."""
    text = yaml.safe_dump_all(objects)
    return plane.kubectl(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", f"--namespace={NAMESPACE}"),
        "--filename=-",
        text=text,
    )


def _accepted(plane: ControlPlane, objects: list[Object]) -> str:
    answer = _must(_apply(plane, objects))
    accepted = answer.output.count("(server dry run)")
    if answer.errors.strip():  # a warning: Pod Security only warns of what would make pods
        raise CheckFailed(answer.complaint)
    if accepted != len(objects):
        raise CheckFailed(f"{accepted} of {len(objects)} objects: {answer.complaint}")
    return f"{accepted} objects"


def _refused(plane: ControlPlane, o: Object, *reasons: str) -> str:
    answer = _apply(plane, [o])
    if answer.ok:
        raise CheckFailed("it was accepted")
    if missing := [reason for reason in reasons if reason not in answer.errors]:
        raise CheckFailed(f"refused for another reason than {', '.join(missing)}: {answer.complaint}")
    return "refused"


def _privileged(objects: list[Object]) -> Object:
    pod = manifests.pods(objects)[0]
    pod["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    return pod


def _install(plane: ControlPlane) -> str:
    place = [f"--namespace={NAMESPACE}", "--values", str(CHART / "production-values.yaml")]
    _must(plane.helm("upgrade", "--install", "penstock", str(CHART), *place))
    installed = len(_must(plane.helm("get", "manifest", "penstock", place[0])).output.split("\n---\n"))
    changed = ["--set-string", "settings.PENSTOCK_ELASTICSEARCH_SHARDS=5"]
    _must(plane.helm("upgrade", "penstock", str(CHART), *place, *changed))
    path = "jsonpath={.data.PENSTOCK_ELASTICSEARCH_SHARDS}"
    seen = _must(plane.kubectl("get", "configmap/penstock-settings", f"--namespace={NAMESPACE}", f"--output={path}"))
    if seen.output != "5":
        raise CheckFailed(f"the upgrade left {seen.output!r}")
    _must(plane.helm("uninstall", "penstock", place[0]))
    return f"{installed} objects"


def _must(answer: Answer) -> Answer:
    if not answer.ok:
        raise CheckFailed(answer.complaint)
    return answer
