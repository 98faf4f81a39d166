"""Elasticsearch's roles: each exactly what its processes call. (Postgres's are tried on a real one, test_roles.py, but
for what the operator may erase: a place that nobody granted is named here.)
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pipeline.ledger.personal import PLACES
from tests.support.deploy.deploy_kit import DEPLOY

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
def test_each_elasticsearch_role_has_exactly_the_privileges_of_its_processes_calls(name: str) -> None:
    privileges = role(name)
    [indices] = privileges["indices"]
    assert set(indices["privileges"]) == NEEDS[name]
    assert privileges["cluster"] == CLUSTER[name]
    assert indices["names"] == ["chunks-*"]
    assert indices["allow_restricted_indices"] is False


def test_the_elasticsearch_role_files_are_exactly_the_expected_ones() -> None:
    assert {file.stem for file in (DEPLOY / "roles/elasticsearch").glob("*.json")} == set(NEEDS)


def granted_to_the_operator(right: str) -> set[str]:
    """Tables on which 2-grants.sql gives this right, be it of some columns."""
    text = re.sub(r"--.*", "", (DEPLOY / "roles/postgres/2-grants.sql").read_text())
    results: set[str] = set()
    for rights, tables, roles in re.findall(r"GRANT ([^;]*?)\sON\s([^;]*?)\sTO\s([^;]*?);", text):
        if "penstock_operator" in roles and right in re.sub(r"\(.*?\)", "", rights).replace(",", " ").split():
            results |= {table.strip() for table in tables.split(",")}
    return results


def test_the_operator_role_may_erase_and_export_every_table_with_personal_data() -> None:
    missing = []
    for place in PLACES:
        needed = {statement.split()[0] for statement in place.erase.values()}
        if place.erase or place.of_person:
            needed.add("SELECT")  # a condition reads too
        missing += [
            f"{right} ON {place.table}" for right in sorted(needed) if place.table not in granted_to_the_operator(right)
        ]
    assert missing == []
