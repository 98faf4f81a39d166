"""deploy/cluster: what its checks conclude from what they see. `make cluster` performs them on a real API server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cluster import checks, manifests, programs, score
from deploy.cluster.control_plane import Answer, ClusterSettings, ControlPlane
from deploy.cluster.manifests import Rendered
from deploy.helm.source import Object, labelled
from deploy.report import CheckFailed
from pipeline.core.errors import Misconfigured

WORKERS = labelled("base/workers.yaml")


class Plane:
    """An API server that always gives the same answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def kubectl(self, *_arguments: str, text: str | None = None) -> Answer:
        assert text
        return self.answer


def plane(*, ok: bool = True, output: str = "", errors: str = "") -> ControlPlane:
    return Plane(Answer(ok, output, errors))  # type: ignore[return-value]


def test_objects_are_equal_whatever_the_order_of_their_mounts_and_volumes() -> None:
    other = json.loads(json.dumps(WORKERS[::-1]))
    for o in other:
        o["metadata"]["namespace"] = manifests.NAMESPACE
        o["spec"]["template"]["spec"]["volumes"].reverse()
    assert manifests.differences(WORKERS, other) == []


def test_a_changed_a_missing_and_an_additional_object_are_differences() -> None:
    other: list[Object] = json.loads(json.dumps(WORKERS))
    other[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    other[1]["metadata"]["name"] = "penstock-other"
    lines = manifests.differences(WORKERS, other)
    assert sorted(line.split(":")[0] for line in lines) == [
        "Deployment penstock-detect",
        "Deployment penstock-other",
        "Deployment penstock-vectors",
    ]
    assert any("-      terminationGracePeriodSeconds: 35" in line for line in lines)


def test_every_template_becomes_a_pod_and_a_misspelt_field_is_at_its_place() -> None:
    objects = [*WORKERS, *labelled("base/migrate.yaml"), *labelled("components/trail-verify/cronjob.yaml")]
    pods = manifests.pods(objects)
    assert [pod["metadata"]["name"] for pod in pods] == [o["metadata"]["name"] for o in objects]
    assert [pod["spec"]["restartPolicy"] for pod in pods] == ["Always"] * 3 + ["OnFailure", "Never"]
    wrong = manifests.misspelt(objects, "Deployment", "readinessProbe", "readinessprobe")
    [container] = wrong["spec"]["template"]["spec"]["containers"]
    assert "readinessprobe" in container
    assert "readinessProbe" not in container
    assert "readinessProbe" in WORKERS[0]["spec"]["template"]["spec"]["containers"][0], "the original stays"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (plane(output="deployment.apps/a serverside-applied (server dry run)\n" * 2), "2 of 3"),
        (plane(output="a (server dry run)\n" * 3, errors="Warning: would violate PodSecurity"), "would violate"),
        (plane(ok=False, errors="connection refused"), "connection refused"),
    ],
    ids=["too few", "warned", "refused"],
)
def test_objects_are_not_accepted_with_a_warning_an_error_or_one_too_few(given: ControlPlane, says: str) -> None:
    assert checks._accepted(plane(output="a (server dry run)\n" * 3), WORKERS) == "3 objects"
    with pytest.raises(CheckFailed, match=says):
        checks._accepted(given, WORKERS)


def test_a_misspelt_field_has_to_be_refused_and_for_that_reason() -> None:
    reasons = (".readinessprobe", "field not declared in schema")
    refusal = ".spec.template.spec.containers[0].readinessprobe: field not declared in schema"
    assert checks._refused(plane(ok=False, errors=refusal), WORKERS[0], *reasons) == "refused"
    with pytest.raises(CheckFailed, match="it was accepted"):
        checks._refused(plane(), WORKERS[0], *reasons)
    with pytest.raises(CheckFailed, match="for another reason"):
        checks._refused(plane(ok=False, errors="connection refused"), WORKERS[0], *reasons)


def test_an_image_without_a_digest_fails() -> None:
    with pytest.raises(CheckFailed, match="penstock"):
        checks._by_digest(Rendered("workers", json.dumps(WORKERS[0])))


def test_only_the_low_grades_of_kube_score_are_findings() -> None:
    comment = {"path": "detect", "summary": "Memory limit is not set"}
    graded = [
        {"check": {"id": "container-resources"}, "grade": 1, "skipped": False, "comments": [comment]},
        {"check": {"id": "pod-probes"}, "grade": 10, "skipped": False, "comments": None},
        {"check": {"id": "stable-version"}, "grade": 1, "skipped": True, "comments": None},
    ]
    lines = score._of_object({"object_name": "penstock-detect", "checks": graded})
    assert lines == ["penstock-detect: container-resources: detect Memory limit is not set"]


def test_without_go_the_check_says_so_and_ends_with_one(tmp_path: Path) -> None:
    environment = {"PATH": "", "PENSTOCK_DIST": str(tmp_path), "PYTHONPATH": str(programs.HERE.parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cluster", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["passed"] is False
    first, *later = answer["checks"]
    assert first["name"] in programs.PROGRAMS
    assert "install Go" in first["detail"]
    assert {check["status"] for check in later} == {"not run"}


def test_a_program_is_built_again_when_its_pins_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DIST", str(tmp_path))
    built: list[list[str]] = []

    def go(arguments: list[str], _folder: Path, _seconds: float) -> str:
        built.append(arguments)
        target = Path(arguments[arguments.index("-o") + 1])
        target.write_text("a program")
        target.chmod(0o755)
        return ""

    monkeypatch.setattr(programs, "_go", go)
    first = programs.require("helm")
    assert programs.require("helm") == first
    assert len(built) == 1
    monkeypatch.setattr(programs, "_pins", lambda module: f"other pins of {module}\nrequire k8s.io/kubernetes v9.9.9\n")
    assert programs.require("helm") != first
    assert len(built) == 2
    assert not first.exists(), "the old one only takes space"


def test_a_definition_with_another_hash_than_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DIST", str(tmp_path))
    monkeypatch.setattr(programs, "_go", lambda *_: json.dumps({"Sum": "h1:other", "Dir": str(tmp_path)}))
    with pytest.raises(Misconfigured, match="has the hash h1:other"):
        programs.definitions()


def test_a_taken_port_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from deploy.cluster import control_plane

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PENSTOCK_CLUSTER_PORT_ETCD", str(taken.getsockname()[1]))
        with pytest.raises(Misconfigured, match="PENSTOCK_CLUSTER_PORT_ETCD"):
            control_plane._ports(ClusterSettings())
