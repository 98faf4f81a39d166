"""deploy/chart renders to what kustomize renders to, with the real programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cluster import checks, manifests, programs

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _built() -> None:
    """Building takes longer than a test may: `make test-slow` does it beforehand, where there is Go."""
    if missing := [name for name in ("kubectl", "helm") if programs.find(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not built: python -m deploy.cluster.programs kubectl helm")


def test_the_chart_renders_to_the_objects_of_the_base_the_example_and_every_component(tmp_path: Path) -> None:
    compared = list(manifests.pairs(tmp_path))
    assert [len(kustomized.objects) > 40 for kustomized, _ in compared] == [True] * 3
    for kustomized, charted in compared:
        assert manifests.differences(kustomized.objects, charted.objects) == []
    different = manifests.charted("chart, another setting", "--set-string", "settings.PENSTOCK_KAFKA_REPLICATION=5")
    [line] = manifests.differences(compared[0][0].objects, different.objects)
    assert line.startswith("ConfigMap penstock-settings: ")


def test_the_chart_rejects_an_unknown_value() -> None:
    assert checks._refuses_unknown_value() == "by its schema"
