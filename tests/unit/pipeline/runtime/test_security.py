"""Secrets from files, logins put together, rights in Kafka, and what people are told when they are not let in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from connectors.declared import load as declared
from deploy.roles.kafka.__main__ import KINDS, LITERAL, OPERATIONS, Acl, desired_acls, is_ours
from pipeline.core.certificates import refused_ours, untrusted
from pipeline.core.errors import Misconfigured
from pipeline.kafka.client import security
from pipeline.kafka.groups import group
from pipeline.runtime.credentials import SECRETS_DIR
from pipeline.runtime.settings import KafkaSettings, Settings, load
from pipeline.stores.postgres import refused
from query.settings import QuerySettings
from query.settings import load as query_settings
from tests.support.deploy.deploy_kit import DEPLOY
from topics.registry import TOPICS


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "secrets"
    folder.mkdir()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(SECRETS_DIR, str(folder))
    return folder


def test_a_secret_can_be_read_from_a_file_named_after_its_variable(secrets: Path) -> None:
    (secrets / "PENSTOCK_POSTGRES_PASSWORD").write_text("p w'd\n")
    (secrets / "penstock_postgres_username").write_text("penstock_work")
    (secrets / "PENSTOCK_ELASTICSEARCH_API_KEY").write_text("key")
    settings = load()
    dsn = conninfo_to_dict(settings.postgres.dsn.get_secret_value())
    assert (dsn["user"], dsn["password"], dsn["dbname"]) == ("penstock_work", "p w'd", "penstock")
    assert settings.elasticsearch.api_key is not None
    assert settings.elasticsearch.api_key.get_secret_value() == "key"
    assert "p w'd" not in repr(settings)


def test_an_environment_variable_takes_precedence_over_a_secret_file(
    secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (secrets / "PENSTOCK_POSTGRES_PASSWORD").write_text("of the file")
    monkeypatch.setenv("PENSTOCK_POSTGRES_PASSWORD", "of the environment")
    assert conninfo_to_dict(load().postgres.dsn.get_secret_value())["password"] == "of the environment"


def test_a_secret_file_named_like_a_settings_section_is_ignored(secrets: Path) -> None:
    """A login of Kafka is called so too: every process refused to start, and said that the file cannot be read."""
    parts = [name for item in (Settings, QuerySettings) for name in item.model_fields]
    assert {"canary", "kafka", "serve"} <= set(parts)
    for name in parts:
        (secrets / f"penstock_{name}").write_text("a password")
    (secrets / "penstock_postgres_password").write_text("of the file")
    assert conninfo_to_dict(load().postgres.dsn.get_secret_value())["password"] == "of the file"
    assert query_settings() == QuerySettings()


def test_a_missing_secrets_folder_is_misconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRETS_DIR, "/nowhere")
    with pytest.raises(Misconfigured, match="PENSTOCK_SECRETS_DIR names /nowhere: No such file"):
        load()


def test_a_secret_file_with_invalid_json_is_named_and_not_quoted(secrets: Path) -> None:
    (secrets / "PENSTOCK_EMBEDDING_API_KEYS").write_text("hunter2")
    with pytest.raises(Misconfigured, match="the file PENSTOCK_EMBEDDING_API_KEYS holds no JSON") as raised:
        load()
    assert "hunter2" not in str(raised.value)


def test_a_connectors_token_can_be_read_from_a_file(secrets: Path, tmp_path: Path) -> None:
    (secrets / "PENSTOCK_BOOK_TOKEN").write_text("t\n")
    (secrets / "PENSTOCK_BOOK_SECRET").write_text("s\n")
    file = tmp_path / "connectors.toml"
    file.write_text('[connector.book]\nkind = "examples.notes:Notes"\nurl = "http://127.0.0.1:1"\n')
    assert "book" in declared(file).plans


@pytest.mark.parametrize("dsn", ["postgres hunter2", "host=a password"])
def test_a_broken_connection_string_is_not_quoted(secrets: Path, monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    monkeypatch.setenv("PENSTOCK_POSTGRES_DSN", dsn)
    with pytest.raises(Misconfigured, match=r"PENSTOCK_POSTGRES_.*is not a connection string") as raised:
        load()
    assert "hunter2" not in str(raised.value)


def test_sasl_without_a_username_is_misconfigured(secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    with pytest.raises(Misconfigured, match="PENSTOCK_KAFKA_SASL_USERNAME"):
        load()


def test_an_unreadable_certificate_is_reported_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "broken.pem").write_text("no certificate")
    for file in (tmp_path / "broken.pem", tmp_path / "missing.pem"):
        with pytest.raises(Misconfigured, match="PENSTOCK_KAFKA_SSL_CAFILE"):
            security(KafkaSettings(security_protocol="SSL", ssl_cafile=str(file)))


def test_the_kafka_acls_name_exactly_the_existing_topics_groups_and_operations() -> None:
    said = json.loads((DEPLOY / "roles/kafka/acls.json").read_text())
    rules = [rule for rules in said.values() for rule in rules]
    assert {topic for rule in rules for topic in rule.get("topics", ())} == {topic.name for topic in TOPICS}
    stages = ("detect", "identities", "conversations", "vectors", "keywords", "webhooks", "conflicts", "standing")
    assert {name for rule in rules for name in rule.get("groups", ())} == {group(stage) for stage in stages}
    assert {operation for rule in rules for operation in rule["may"]} == OPERATIONS.keys()


def test_only_migrate_may_create_topics_or_add_partitions_and_no_login_may_delete_or_configure_them() -> None:
    said = json.loads((DEPLOY / "roles/kafka/acls.json").read_text())
    may = {login: {operation for rule in rules for operation in rule["may"]} for login, rules in said.items()}
    for operation in ("Create", "Alter"):  # of a topic, Alter is to add partitions; its settings are AlterConfigs
        assert {login for login, operations in may.items() if operation in operations} == {"penstock_migrate"}
    assert set.union(*may.values()) == {"Alter", "Create", "Describe", "DescribeConfigs", "Read", "Write"}


def test_each_topic_may_be_written_only_by_its_producers() -> None:
    writers: dict[str, set[str]] = {}
    for principal, rights in desired_acls("x.").items():
        for right in rights:
            assert right.name.startswith("x.")
            if right.operation == OPERATIONS["Write"]:
                writers.setdefault(right.name, set()).add(principal.removeprefix("User:penstock_"))
    sources, sinks = {"x.identities.v1", "x.conversations.live.v1"}, {"vectors", "keywords"}
    assert {topic: writers[topic] - {"migrate"} for topic in writers} == {
        **{topic: {"connect"} for topic in sources},
        "x.documents.live.v1": {"connect", "canary"},
        "x.documents.backfill.v1": {"connect", "detect"},
        "x.index.live.v1": {"detect"},
        "x.index.backfill.v1": {"detect"},
        "x.documents.indexed.v1": {"detect"} | sinks,
        "x.conflicts.v1": {"analyse"},
        "x.answers.invalidated.v1": {"analyse"},
        "x.dead-letters.v1": {"detect"} | sinks,
    }


@pytest.mark.parametrize("prefix", ["", "staging."])
def test_acls_of_another_installation_for_the_same_users_are_left_alone(prefix: str) -> None:
    known = {right.name for rights in desired_acls(prefix).values() for right in rights}

    def ours(kind: int, name: str) -> bool:
        return is_ours(Acl(kind, name, LITERAL, "User:penstock_detect", "*", OPERATIONS["Read"], 3), known, prefix)

    theirs = [right for rights in desired_acls("prod.").values() for right in rights]
    assert not [right for right in theirs if is_ours(right, known, prefix)]
    assert ours(KINDS["topics"], f"{prefix}dead-letters.v1")  # too much, but of our own topics
    assert ours(KINDS["topics"], "*")
    assert ours(KINDS["topics"] + 2, "kafka-cluster")
    assert ours(KINDS["groups"], f"{prefix}former") == (prefix != "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired", "has expired"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] Hostname mismatch, certificate is not valid for 'a'", "is for another host"),
        ("certificate verify failed: self-signed certificate in certificate chain", "set CA to the authority"),
        ("Connection refused", None),
    ],
)
def test_an_untrusted_certificate_is_explained(text: str, said: str | None) -> None:
    explanation = untrusted(text, authority="CA", address="URL")
    assert explanation is None if said is None else said in (explanation or "")


def test_a_rejected_client_certificate_is_distinguished_from_an_untrusted_server() -> None:
    assert "CERT" in (refused_ours("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert", setting="CERT") or "")
    assert refused_ours("[SSL: CERTIFICATE_VERIFY_FAILED] bad certificate", setting="CERT") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('FATAL:  password authentication failed for user "u"', "PENSTOCK_POSTGRES_USERNAME"),
        ('FATAL:  no pg_hba.conf entry for host "h", user "u", database "d", no encryption', "sslmode=verify-full"),
        ("server does not support SSL, but SSL was required", "does not use TLS"),
        ('server certificate for "a" (and 1 other name) does not match host name "b"', "is for another host"),
        ("FATAL:  connection requires a valid client certificate", "requires a client certificate"),
        ("connection refused; is the server running?", None),
        ("FATAL:  the database system is starting up", None),
    ],
)
def test_a_refused_postgres_login_is_explained(text: str, said: str | None) -> None:
    explanation = refused(text)
    assert explanation is None if said is None else said in (explanation or "")
