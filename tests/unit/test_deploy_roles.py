"""Elasticsearch's roles: each exactly what its processes call. (Postgres's are tried on a real one, test_roles.py.)"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.deploy_kit import DEPLOY

CALLS = {
    "read": "search, get, count, open_point_in_time",
    "index": "bulk",
    "delete": "bulk",
    "maintenance": "indices.refresh",
    "view_index_metadata": "indices.exists, indices.get",
    "monitor": "indices.stats",
    "create_index": "indices.create",
    "delete_index": "indices.delete",
    "manage": "indices.put_settings",
}
"""Elasticsearch's privilege → the client's calls that need it."""
NEEDS = {
    "penstock_query": {"read", "view_index_metadata", "monitor"},
    "penstock_worker": {"read", "view_index_metadata", "monitor", "index", "delete", "maintenance"},
    "penstock_migrate": set(CALLS) - {"monitor"},  # which "manage" includes
}
CLUSTER = {
    "penstock_query": [],
    "penstock_worker": ["monitor"],  # cluster.health, when a refresh reached too few shards
    "penstock_migrate": ["monitor", "manage_index_templates"],
}


def role(name: str) -> dict[str, Any]:
    return json.loads((DEPLOY / f"roles/elasticsearch/{name}.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NEEDS)
def test_a_role_has_what_its_processes_call_and_no_more(name: str) -> None:
    found = role(name)
    [indices] = found["indices"]
    assert set(indices["privileges"]) == NEEDS[name]
    assert found["cluster"] == CLUSTER[name]
    assert indices["names"] == ["chunks-*"]
    assert indices["allow_restricted_indices"] is False


def test_there_is_a_role_for_each_and_none_besides() -> None:
    assert {file.stem for file in (DEPLOY / "roles/elasticsearch").glob("*.json")} == set(NEEDS)
