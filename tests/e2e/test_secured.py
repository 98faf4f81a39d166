"""Everything over verified TLS, every process in its own login with the rights that deploy/roles gives it, on servers
that refuse all else: from a folder to the query over HTTP; and what is refused says why in one line."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupAuthorizationFailedError, TopicAuthorizationFailedError

from deploy.certificates import Authority
from deploy.local.secured import OWNER
from pipeline.core.errors import PenstockError
from pipeline.kafka.client import security
from pipeline.kafka.producer import NotDelivered
from tests.fakes.webhooks import FakeWebhook
from tests.support.deploy.secured_kit import Site, secured_site
from tests.support.deploy.secured_knocks import (
    certified_port,
    consumer,
    elasticsearch,
    kafka_settings,
    kafkas_health,
    knock_at_elasticsearch,
    knock_at_kafka,
    knock_at_postgres,
    let_in_by_kafka,
    producer_of,
    showing,
)
from tests.support.deploy.secured_rights import (
    DENIED,
    ELASTICSEARCH_DENIES,
    KAFKA_DENIES_READING,
    KAFKA_DENIES_WRITING,
    POSTGRES_DENIES,
)
from topics.codec import encode
from topics.messages import AccessChanged, IdentityChanged
from topics.registry import IDENTITIES, TOPICS
from topics.signatures import Signer

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

WORKERS = {
    "detect": "penstock_detect",
    "vectors": "penstock_vectors",
    "keywords": "penstock_keywords",
    "analysis": "penstock_analyse",
}
TOPIC = {topic.name: topic for topic in TOPICS}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with secured_site(tmp_path_factory.mktemp("secured")) as site:
        (site.home / "folder").mkdir()
        (site.home / "folder" / "numbat.md").write_text("The numbat eats termites, and nothing else.")
        signed = {"PENSTOCK_PRODUCERS": "enforce", "PENSTOCK_KAFKA_SIGNING_KEY_FILE": str(site.enrol("folder"))}
        for name, login in WORKERS.items():
            site.start(name, login, "worker", name, PENSTOCK_PRODUCERS="enforce")
        site.start("folder", "penstock_connect", "watch", str(site.home / "folder"), "--acl", "staff", **signed)
        site.start("query", "penstock_ask", "serve", PENSTOCK_AUTH_KEYS_FILE=str(site.keys_file()))
        for name in (*WORKERS, "query"):
            site.await_ready(name)
        yield site


@pytest.mark.slow
def test_a_folders_file_is_searchable_in_both_stores_over_tls_with_least_privilege(site: Site) -> None:
    deadline = time.monotonic() + 90

    def named_results() -> list[tuple[str, list[str]]]:
        return [
            (Path(result["external_id"]).name, sorted(result["stores"]))
            for result in site.ask("numbat termites")["results"]
        ]

    while named_results() != [("numbat.md", ["keyword", "vector"])]:
        assert time.monotonic() < deadline, {name: site.log(name)[-2000:] for name in site.processes}
        time.sleep(0.3)
    for name in site.processes:
        log = site.log(name)
        assert not [word for word in DENIED if word in log], name


@pytest.mark.slow
async def test_records_without_a_valid_signature_change_nothing_and_become_dead_letters(site: Site) -> None:
    """The connectors' login, stolen: its ACLs let it write, and one forged membership would be enough."""
    folder, removed = site.home / "folder.pem", site.enrol("removed", "default/*")
    assert site.penstock(OWNER, "producer", "remove", "removed")[0] == 0
    place = {"tenant": "default", "source": "folder", "observed_at": datetime.now(UTC)}
    forged = [
        (IDENTITIES, IdentityChanged(**place, principal="eve", groups=["staff"])),
        (TOPIC["documents.live.v1"], AccessChanged(**place, external_id="numbat.md", acl_tags=["user:eve"])),
    ]
    foreign = IdentityChanged(**{**place, "tenant": "globex"}, principal="eve", groups=["board"])
    elsewhere = Signer(folder.read_bytes()).headers("documents.live.v1", b"", b"", [])
    async with producer_of(site, "penstock_connect") as kafka:
        for topic, message in forged:
            record = encode(message)
            await (await kafka.send(topic, message))
            await (await kafka.send_raw(topic, record.key, record.value, [*record.headers, elsewhere[-1]]))
    for key, messages in ((removed, forged), (folder, [(IDENTITIES, foreign)])):
        async with producer_of(site, "penstock_connect", key) as kafka:
            for topic, message in messages:
                await (await kafka.send(topic, message))
    expected = {"unsigned": 2, "bad_signature": 2, "key_not_in_force": 2, "not_allowed": 1}
    with psycopg.connect(site.secured.postgres(), autocommit=True) as admin:
        deadline = time.monotonic() + 60
        while dict(admin.execute("SELECT code, count(*) FROM dead_letters GROUP BY 1").fetchall()) != expected:
            assert time.monotonic() < deadline, site.log("detect")[-3000:]
            await asyncio.sleep(0.2)
        assert admin.execute("SELECT count(*) FROM memberships WHERE principal = 'eve'").fetchall() == [(0,)]
        assert admin.execute("SELECT count(*) FROM access_sets WHERE 'folder/user:eve' = ANY(acl_tags)").fetchall() == [
            (0,)
        ]


@pytest.mark.slow
async def test_the_connectors_login_may_send_webhooks(site: Site) -> None:
    key = {"PENSTOCK_WEBHOOKS_KEY": "a key of thirty-two characters and more"}
    async with FakeWebhook() as receiver:
        arguments = ("webhook", "add", "shop", receiver.url, "--allow-private", "--json")
        code, added, errors = await asyncio.to_thread(site.penstock, OWNER, *arguments, **key)
        assert code == 0, errors
        receiver.secrets.append(json.loads(added)["secret"])
        more = {
            **key,
            "PENSTOCK_PRODUCERS": "enforce",
            "PENSTOCK_KAFKA_SIGNING_KEY_FILE": str(site.home / "folder.pem"),
        }
        await asyncio.to_thread(site.start, "connectors", "penstock_connect", "worker", "connectors", **more)
        (site.home / "folder" / "quoll.md").write_text("The quoll is awake at night.")
        deadline = time.monotonic() + 120
        while not any(event["external_id"].endswith("quoll.md") for event in receiver.events()):
            assert time.monotonic() < deadline, site.log("connectors")[-2000:]
            await asyncio.sleep(0.3)
        assert receiver.forged == 0
        assert not [word for word in DENIED if word in site.log("connectors")]


# What is refused, and how that is said

OTHER = "other authority"


async def refusal_of(site: Site, knock: Awaitable[None]) -> str:
    """Return the one line of a refusal, which must hold no secret."""
    with pytest.raises(PenstockError) as refused:
        await knock
    line = str(refused.value)
    assert "\n" not in line
    assert not [secret for secret in site.all_secrets() if secret in line]
    return line


@pytest.mark.slow
async def test_correct_logins_are_accepted_by_every_server(site: Site) -> None:
    await knock_at_kafka(site)
    await knock_at_postgres(site)
    await knock_at_postgres(site, login=OWNER)
    await knock_at_elasticsearch(site)


@pytest.mark.slow
async def test_a_server_certificate_of_another_authority_is_refused_naming_the_setting(
    site: Site, tmp_path: Path
) -> None:
    other = str(Authority(tmp_path, OTHER).ca)
    assert "set PENSTOCK_KAFKA_SSL_CAFILE to the authority" in await refusal_of(
        site, knock_at_kafka(site, ssl_cafile=other)
    )
    assert "set sslrootcert in PENSTOCK_POSTGRES_DSN to the authority" in await refusal_of(
        site, knock_at_postgres(site, sslrootcert=other)
    )
    assert "set PENSTOCK_ELASTICSEARCH_CA_CERTS to the authority" in await refusal_of(
        site, knock_at_elasticsearch(site, ca_certs=other)
    )


@pytest.mark.slow
async def test_a_wrong_password_is_reported_with_the_names_of_its_settings(site: Site) -> None:
    assert "PENSTOCK_KAFKA_SASL_PASSWORD" in (
        await refusal_of(site, knock_at_kafka(site, sasl_password="wrong"))
    ).replace("and _SASL", "and PENSTOCK_KAFKA_SASL")
    assert "refuses the login" in await refusal_of(
        site, knock_at_kafka(site, sasl_password="wrong", sasl_mechanism="PLAIN")
    )
    assert "PENSTOCK_POSTGRES_USERNAME and _PASSWORD" in await refusal_of(
        site, knock_at_postgres(site, password="wrong")
    )
    assert "PENSTOCK_ELASTICSEARCH_API_KEY or _USERNAME" in await refusal_of(
        site, knock_at_elasticsearch(site, password="wrong")
    )


@pytest.mark.slow
async def test_connections_without_tls_are_refused(site: Site) -> None:
    plain = {"security_protocol": "PLAINTEXT"}
    assert "it requires TLS: set PENSTOCK_KAFKA_SECURITY_PROTOCOL" in await refusal_of(
        site, knock_at_kafka(site, **plain)
    )
    assert "requires TLS for this user" in await refusal_of(site, knock_at_postgres(site, sslmode="disable"))
    url = site.secured.stack.endpoints()["elasticsearch"]["url"].replace("https", "http")
    line = await refusal_of(
        site, knock_at_elasticsearch(site, url=url, ca_certs=None, client_cert=None, client_key=None)
    )
    assert "requires https" in line


@pytest.mark.slow
async def test_a_login_without_our_client_certificate_is_refused_where_one_is_required(
    site: Site, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path, OTHER).issue(OWNER)
    expected = "client certificate"
    certified = f"127.0.0.1:{certified_port(site)}"
    by_certificate = {"bootstrap": certified, "security_protocol": "SSL"}
    assert expected in await refusal_of(site, knock_at_kafka(site, **by_certificate))
    shown = site.secured.logins["penstock_detect"].certificate
    await knock_at_kafka(site, **by_certificate, ssl_certfile=str(shown.certificate), ssl_keyfile=str(shown.key))
    theirs = {"sslcert": str(foreign.certificate), "sslkey": str(foreign.key)}
    assert expected in await refusal_of(site, knock_at_postgres(site, login=OWNER, **theirs))
    assert expected in await refusal_of(site, knock_at_elasticsearch(site, client_cert=None, client_key=None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "said"), [({"expired": True}, "has expired"), ({"hosts": ["elsewhere.example"]}, "is for another host")]
)
async def test_a_server_certificate_that_expired_or_is_another_hosts_is_refused(
    site: Site, wrong: dict[str, Any], said: str
) -> None:
    shown = site.secured.authority.issue("wrong", **wrong)
    async with showing(shown.certificate, shown.key) as port:
        assert said in await refusal_of(site, knock_at_kafka(site, bootstrap=f"127.0.0.1:{port}"))
        assert said in await refusal_of(
            site, knock_at_postgres(site, port=str(port), sslnegotiation="direct", sslmode="verify-full")
        )
        assert said in await refusal_of(site, knock_at_elasticsearch(site, url=f"https://127.0.0.1:{port}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("penstock_kafka_sasl_password", "error: Kafka at 127.0.0.1:"),
        ("penstock_postgres_password", "error: Postgres at 127.0.0.1:"),
    ],
)
def test_a_worker_with_a_wrong_password_exits_with_a_one_line_error(
    site: Site, tmp_path: Path, wrong: str, said: str
) -> None:
    right = Path(site.environment("penstock_detect")["PENSTOCK_SECRETS_DIR"])
    for file in right.iterdir():
        (tmp_path / file.name).write_text("guessed" if file.name == wrong else file.read_text())
    code, out, errors = site.penstock("penstock_detect", "worker", "detect", PENSTOCK_SECRETS_DIR=str(tmp_path))
    assert code == 1
    assert "Traceback" not in out + errors
    assert errors.splitlines()[-1].startswith(said)
    assert "refuses the login" in errors.splitlines()[-1]
    assert not [secret for secret in site.all_secrets() if secret in out + errors]


# Who may what


@pytest.mark.slow
@pytest.mark.parametrize("login", POSTGRES_DENIES)
def test_postgres_refuses_each_login_what_it_does_not_need(site: Site, login: str) -> None:
    shown = site.secured.logins[login]
    with psycopg.connect(site.secured.postgres()) as admin:
        [(chunks,)] = admin.execute("SELECT chunk_table FROM generations").fetchall()
    with psycopg.connect(site.secured.postgres(user=login, password=shown.password), autocommit=True) as connection:
        for statement in POSTGRES_DENIES[login]:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.format(chunks=chunks).encode())


@pytest.mark.slow
@pytest.mark.parametrize("login", ELASTICSEARCH_DENIES)
def test_elasticsearch_refuses_each_login_what_it_does_not_need(site: Site, login: str) -> None:
    somebody = {"password": "somebody's own", "roles": ["superuser"]}
    with elasticsearch(site, login) as client:
        answers = [
            client.request(
                method, path, json=None if method in ("GET", "DELETE") else somebody if "user" in path else {}
            )
            for method, path in ELASTICSEARCH_DENIES[login]
        ]
    assert [answer.status_code for answer in answers] == [403] * len(answers), [answer.text for answer in answers]


@pytest.mark.slow
def test_the_connectors_login_cannot_access_elasticsearch(site: Site) -> None:
    with elasticsearch(site, "penstock_connect") as client:
        assert client.get("/chunks-g1/_search").status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize("login", KAFKA_DENIES_WRITING)
async def test_kafka_refuses_each_login_writing_topics_it_does_not_need(site: Site, login: str) -> None:
    for topic in KAFKA_DENIES_WRITING[login]:
        with pytest.raises(NotDelivered, match=r"does not let this user write|ClusterAuthorizationFailed"):
            async with producer_of(site, login) as kafka:
                await (await kafka.send_raw(TOPIC[topic], b"key", b"value", []))


@pytest.mark.slow
@pytest.mark.parametrize("login", KAFKA_DENIES_READING)
async def test_kafka_refuses_each_login_reading_topics_it_does_not_need(site: Site, login: str) -> None:
    options = security(kafka_settings(site, login))
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_settings(site, login).bootstrap, **options)
    await admin.start()
    try:
        errors = {
            topic["topic"]: topic["error_code"] for topic in await admin.describe_topics(KAFKA_DENIES_READING[login])
        }
    finally:
        await admin.close()
    seen = [topic for topic, code in errors.items() if code != TopicAuthorizationFailedError.errno]
    for topic in seen:  # it may know that there is one; what stands there it may not
        async with consumer(site, login, None) as kafka:
            kafka.assign([TopicPartition(topic, 0)])
            kafka.seek(TopicPartition(topic, 0), 0)
            with pytest.raises(TopicAuthorizationFailedError):
                await asyncio.wait_for(kafka.getone(), 20)


@pytest.mark.slow
async def test_kafka_refuses_a_login_another_workers_consumer_group(site: Site) -> None:
    async with consumer(site, "penstock_keywords", "penstock-vectors") as kafka:
        kafka.subscribe(["index.live.v1"])
        with pytest.raises(GroupAuthorizationFailedError):
            await asyncio.wait_for(kafka.getone(), 20)


@pytest.mark.slow
async def test_the_kafka_users_step_creates_users_and_applies_changed_passwords(site: Site) -> None:
    for password, other in (("first", "second"), ("second", "first")):
        assert site.make_kafka_users({"penstock_canary": password})[1].startswith("passwords: penstock_canary\n")
        canary = {"sasl_username": "penstock_canary", "sasl_password": password}
        await let_in_by_kafka(site, **canary)
        assert "refuses the login" in await refusal_of(site, knock_at_kafka(site, **{**canary, "sasl_password": other}))
    await knock_at_kafka(site)  # the others are who they were
    code, _, errors = site.make_kafka_users({})
    assert code == 1
    assert "no file is named as one of penstock_analyse, penstock_ask" in errors.splitlines()[-1]


@pytest.mark.slow
def test_kafkas_own_tools_log_in_with_the_admin_properties_of_compose(site: Site, tmp_path: Path) -> None:
    done = kafkas_health(site, tmp_path)
    assert (done.returncode, "Produce(0)" in done.stdout) == (0, True), done.stderr[-2000:]


@pytest.mark.slow
def test_status_with_the_query_login_reports_no_outage(site: Site) -> None:
    code, report, _ = site.penstock("penstock_ask", "status", "--json")
    assert (code, json.loads(report)["away"]) == (0, []), report


@pytest.mark.slow
def test_applying_the_kafka_acls_again_changes_nothing(site: Site) -> None:
    assert site.give_acls()[:2] == (0, "Everything is as it should be.\n")
    assert " 0 taken away" in site.give_acls(prefix="prod.")[1]  # a second installation in the same cluster
    code, report, left = site.give_acls()
    assert (code, report) == (0, "Everything is as it should be.\n")
    assert "penstock_connect: topic prod.documents.live.v1" in left
    code, _, errors = site.run("penstock_connect", "-m", "deploy.roles.kafka")
    assert code == 1
    assert "super.users" in errors.splitlines()[-1]
    assert "Traceback" not in errors


@pytest.mark.slow
def test_no_secret_is_in_a_command_line_environment_log_or_status(site: Site) -> None:
    secrets = site.all_secrets()
    for process in psutil.Process().children(recursive=True):
        said = " ".join(process.cmdline()) + " ".join(process.environ().values())
        assert not [secret for secret in secrets if secret in said], process.name()
    for log in [*site.home.glob("*.log"), *site.home.rglob("logs/**/*.log")]:
        text = log.read_text(errors="replace")
        assert not [secret for secret in secrets if secret in text], log
    status = site.penstock(OWNER, "status", "--json", PENSTOCK_HOME=str(site.secured.home))
    assert '"ready"' in status[1]
    assert not [secret for secret in secrets if secret in status[1] + status[2]]
    for file in site.home.rglob("*"):
        if file.is_file() and file.stat().st_size < 100_000:
            held = [secret for secret in secrets if secret.encode() in file.read_bytes()]
            assert not held or file.stat().st_mode & 0o077 == 0, file
