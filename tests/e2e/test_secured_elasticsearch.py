"""Elasticsearch's users, roles and API keys as docs/deploy.md has them made, on a real one with its security module."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.secured import ADMIN, ROLES, Secured
from pipeline.core.errors import Misconfigured
from pipeline.runtime.settings import ElasticsearchSettings
from pipeline.stores.elasticsearch import connect, translated
from tests.support.deploy.secured_kit import SMALL
from tests.support.processes import PROJECT

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600), pytest.mark.slow]

SCRIPT = PROJECT / "deploy" / "image" / "elasticsearch-users.sh"
PASSWORDS = {"admin": "the first one's", "owner": "owner's own", "worker": "worker's own", "query": "query's own"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """With the password of `elastic` set, as the container's entry point does it, and an index to look at."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setenv(name, value)
        secured = Secured(tmp_path_factory.mktemp("secured"), {})
        secured.stack.up(services=("elasticsearch",))
    try:
        with client(secured, auth=(ADMIN, secured.logins[ADMIN].password)) as admin:
            admin.put("/_security/user/elastic/_password", json={"password": PASSWORDS["admin"]}).raise_for_status()
            admin.put("/chunks-g1").raise_for_status()
        yield secured
    finally:
        secured.stack.down()


def client(secured: Secured, **more: Any) -> httpx.Client:
    url = secured.stack.endpoints()["elasticsearch"]["url"]
    return httpx.Client(base_url=url, verify=secured.context(ADMIN), timeout=30, **more)


def run_script(secured: Secured, folder: Path, passwords: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The step `elasticsearch-users` of docker-compose.yml; certificates as curl reads them."""
    for name, password in passwords.items():
        (folder / f"elasticsearch_{name}").write_text(password)
    shown = secured.logins[ADMIN].certificate
    (folder / ".curlrc").write_text(f'cert = "{shown.certificate}"\nkey = "{shown.key}"\n')
    given = {
        "PATH": os.environ["PATH"],
        "SECRETS": str(folder),
        "ROLES": str(ROLES),
        "CURL_HOME": str(folder),
        "CURL_CA_BUNDLE": str(secured.authority.ca),
        "ELASTICSEARCH": secured.stack.endpoints()["elasticsearch"]["url"],
    }
    return subprocess.run(["bash", str(SCRIPT)], env=given, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def users(server: Secured, tmp_path: Path) -> Secured:
    done = run_script(server, tmp_path, PASSWORDS)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return server


MAY = {
    "penstock_query": {"GET /chunks-g1/_count": 200, "POST /chunks-g1/_doc": 403, "DELETE /chunks-g1": 403},
    "penstock_worker": {"GET /chunks-g1/_count": 200, "POST /chunks-g1/_doc": 201, "DELETE /chunks-g1": 403},
    "penstock_migrate": {
        "PUT /others": 403,
        "GET /_security/user": 403,
        "PUT /chunks-g2": 200,
        "DELETE /chunks-g2": 200,
    },
}
"""role → what is asked, and the status of the answer."""


def statuses(client: httpx.Client, role: str) -> dict[str, int]:
    return {
        request: client.request(*request.split(), json={} if request.startswith("POST") else None).status_code
        for request in MAY[role]
    }


@pytest.mark.parametrize(
    ("role", "secret"), [("penstock_query", "query"), ("penstock_worker", "worker"), ("penstock_migrate", "owner")]
)
def test_the_compose_script_creates_users_with_the_rights_of_their_role(users: Secured, role: str, secret: str) -> None:
    with client(users, auth=(role, PASSWORDS[secret])) as one:
        assert one.get("/_security/_authenticate").json()["roles"] == [role]
        assert statuses(one, role) == MAY[role]


def test_the_compose_script_applies_a_changed_password_when_it_runs_again(users: Secured, tmp_path: Path) -> None:
    assert run_script(users, tmp_path, {**PASSWORDS, "query": "another"}).returncode == 0
    for password, status in ((PASSWORDS["query"], 401), ("another", 200)):
        with client(users, auth=("penstock_query", password)) as one:
            assert one.get("/chunks-g1/_count").status_code == status


def test_the_compose_script_fails_with_a_wrong_password_and_prints_none(users: Secured, tmp_path: Path) -> None:
    done = run_script(users, tmp_path, {**PASSWORDS, "admin": "guessed"})
    assert done.returncode != 0
    assert "401" in done.stderr
    assert not [password for password in (*PASSWORDS.values(), "guessed") if password in done.stdout + done.stderr]


@pytest.mark.parametrize("role", MAY)
async def test_an_api_key_has_the_rights_of_its_role_until_it_is_revoked(users: Secured, role: str) -> None:
    descriptor = json.loads((ROLES / f"{role}.json").read_text())
    del descriptor["description"]  # docs/deploy.md says so: Elasticsearch takes none in a key
    with client(users, auth=(ADMIN, users.logins[ADMIN].password)) as admin:
        answer = admin.post("/_security/api_key", json={"name": role, "role_descriptors": {role: descriptor}})
        assert answer.status_code == 200, answer.text
        made = answer.json()
        with client(users, headers={"authorization": f"ApiKey {made['encoded']}"}) as one:
            assert statuses(one, role) == MAY[role]
        shown = users.logins[ADMIN].certificate
        es = connect(
            ElasticsearchSettings(
                url=users.stack.endpoints()["elasticsearch"]["url"],
                api_key=made["encoded"],
                ca_certs=str(users.authority.ca),
                client_cert=str(shown.certificate),
                client_key=str(shown.key),
            )
        )
        try:
            assert (await es.count(index="chunks-*"))["count"] >= 0
            admin.request("DELETE", "/_security/api_key", json={"ids": [made["id"]]}).raise_for_status()
            with pytest.raises(Misconfigured, match="PENSTOCK_ELASTICSEARCH_API_KEY or _USERNAME"), translated("count"):
                await es.count(index="chunks-*")
        finally:
            await es.close()
