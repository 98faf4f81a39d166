"""kube-score's opinion of the manifests, and why some of its checks are not ours."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from deploy.cluster import programs

IGNORED = {
    "container-image-pull-policy": "An image is named with its digest: pulling it again at each start yields the same"
    " bytes, and ties every restart to the registry.",
    "deployment-has-host-podantiaffinity": "topologySpreadConstraints spread the pods over zones and machines, and"
    " evenly, which an anti-affinity does not.",
}
"""Checks that are not made, with the reason. Findings about one object alone are ignored at that object."""
OPTIONS = (
    "--ignore-container-cpu-limit",  # a limit of processors throttles while others are idle; requests share them
    "--exit-one-on-warning",
    "--enable-optional-test=container-seccomp-profile",
    "--enable-optional-test=container-ports-check",
    *(f"--ignore-test={check}" for check in IGNORED),
)
SCORE_SECONDS = 60
PASSED_GRADE = 10


def findings(text: str) -> list[str]:
    """One line for each finding about these manifests. Raises OSError and TimeoutExpired."""
    major, minor = programs.kubernetes_version().split(".")[:2]
    done = subprocess.run(
        [
            *(str(programs.require("kube-score")), "score", *OPTIONS),
            *(f"--kubernetes-version={major}.{minor}", "--output-format=json", "-"),
        ],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=SCORE_SECONDS,
    )
    try:
        scored = json.loads(done.stdout)
    except json.JSONDecodeError:
        return [f"kube-score: {' '.join(done.stderr.split())[:300]}"]
    results = [line for o in scored for line in _of_object(o)]
    if done.returncode != 0 and not results:
        results.append(f"kube-score ended with {done.returncode}: {' '.join(done.stderr.split())[:300]}")
    return results


def _of_object(o: dict[str, Any]) -> list[str]:
    return [
        f"{o['object_name']}: {check['check']['id']}"
        + "".join(f": {comment['path']} {comment['summary']}" for comment in check["comments"] or ())
        for check in o["checks"]
        if not check["skipped"] and check["grade"] < PASSED_GRADE
    ]
