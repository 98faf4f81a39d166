"""docker-compose.yml: everything that it names is there, and everything is as narrow as it says."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import yaml

from connectors.extraction.settings import ExtractionSettings
from deploy.alertmanager.settings import AlertingSettings
from deploy.local.kafka import LARGEST_RECORD_BYTES
from query.limits.quotas import NONE, parse
from tests.support.deploy.deploy_kit import (
    DEPLOY,
    ROOT,
    STOP_SECONDS,
    assert_is_a_command,
    assert_settings_take,
    interpolated,
    unknown,
)

TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [
    n for n, service in SERVICES.items() if service["image"].startswith("penstock:") and "entrypoint" not in service
]
"""The image's own entry point: `penstock`."""
WITH_LOGINS = [name for name in OURS if name != "extraction"]
ONCE = [name for name, service in SERVICES.items() if service["restart"] in ("on-failure", "no")]
ENROL = ("producer-connectors", "producer-canary", "producer-demo")
EXAMPLE = dict(
    line.split("=", 1)
    for line in (DEPLOY / "image/example.env").read_text().splitlines()
    if re.match(r"[A-Z_]+=", line)
)
GIVEN = {name: value or "given" if name.endswith("PASSWORD") else value for name, value in EXAMPLE.items()}


@pytest.mark.parametrize("name", [n for n, service in SERVICES.items() if not service["image"].startswith("penstock:")])
def test_third_party_images_are_pinned_by_digest(name: str) -> None:
    assert re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", SERVICES[name]["image"])
    repository = SERVICES[name]["image"].partition(":")[0]
    assert len({s["image"] for s in SERVICES.values() if s["image"].startswith(f"{repository}:")}) == 1


def environment(name: str) -> dict[str, str]:
    given = SERVICES[name].get("environment", {})
    return {key: interpolated(str(value), GIVEN) for key, value in given.items()}


def secrets(name: str) -> dict[str, str]:
    """Its secrets: file → secret."""
    given = SERVICES[name].get("secrets", ())
    return dict((item["target"], item["source"]) if isinstance(item, dict) else (item, item) for item in given)


def test_every_reference_to_a_network_secret_or_volume_resolves() -> None:
    for name, service in SERVICES.items():
        assert not (service.get("read_only") and service.get("secrets")), (
            f"{name}: Compose cannot write secrets into it"
        )
        assert set(service.get("networks", ())) <= set(COMPOSE["networks"]), name
        assert set(secrets(name).values()) <= set(COMPOSE["secrets"]), name
        for volume in service.get("volumes", ()):
            source = interpolated(volume, EXAMPLE).split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
    used = {secret for name in SERVICES for secret in secrets(name).values()}
    assert used == set(COMPOSE["secrets"])


def test_every_depends_on_condition_can_be_met() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES, f"{name} waits for {other}"
            match how["condition"]:
                case "service_healthy":
                    assert "healthcheck" in SERVICES[other], f"{name} waits for {other}'s health for ever"
                case "service_completed_successfully":
                    assert other in ONCE, f"{name} waits for the end of {other}, which has none"


def test_the_example_env_file_lists_exactly_the_variables_that_are_used() -> None:
    named = set(re.findall(r"\$\{(\w+)", TEXT)) | {secret["environment"] for secret in COMPOSE["secrets"].values()}
    assert named == set(EXAMPLE)
    assert not [name for name, value in EXAMPLE.items() if value and name.endswith("PASSWORD")]


@pytest.mark.parametrize("name", OURS)
def test_every_environment_variable_is_a_setting_with_a_valid_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown(environment(name)) == []
    assert_settings_take(environment(name), monkeypatch)


@pytest.mark.parametrize("name", OURS)
def test_our_services_run_existing_commands_in_read_only_containers(name: str) -> None:
    service = SERVICES[name]
    assert_is_a_command(service["command"])
    assert service["read_only"] is True
    assert service["user"] == ("10002:10002" if name == "extraction" else "10001:10001")
    assert float(service["stop_grace_period"].removesuffix("s")) > STOP_SECONDS
    assert service["tmpfs"], "workers need /tmp"


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_drops_privileges_and_has_limits(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    repository, _, tag = service["image"].partition(":")
    assert re.match(r"v?\d+\.\d+", tag), f"{service['image']} is not pinned"
    assert "." not in repository.split("/")[0], "short names only: whose registry it is, is the operator's to say"
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:"), port
    if name not in ONCE:
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}


@pytest.mark.parametrize("name", [n for n in OURS if "ports" in SERVICES[n]])
def test_trusted_proxies_come_from_a_variable_that_is_empty_by_default(name: str) -> None:
    assert variable(name, "PENSTOCK_PORTS_TRUSTED_PROXIES") == "TRUSTED_PROXIES"
    assert environment(name)["PENSTOCK_PORTS_TRUSTED_PROXIES"] == EXAMPLE["TRUSTED_PROXIES"] == "[]"


HEALTH = {
    "query": ("PENSTOCK_SERVE_PORT", "query/http/health.py"),
    "extraction": ("PENSTOCK_EXTRACTION_PORT", "connectors/extraction/service.py"),
}
"""Setting of the port, and where it is served, of those that are not workers."""


@pytest.mark.parametrize("name", [n for n in OURS if "healthcheck" in SERVICES[n]])
def test_health_checks_use_the_port_and_path_of_the_service(name: str) -> None:
    given = environment(name)
    [(port, path)] = re.findall(r"127\.0\.0\.1:(\d+)(/\w+)", shlex.join(SERVICES[name]["healthcheck"]["test"]))
    setting, source = HEALTH.get(name, ("PENSTOCK_STREAM_HEALTH_PORT", "pipeline/runtime/health.py"))
    assert port == given[setting]
    assert f'"{path}"' in (ROOT / source).read_text()


def test_prometheus_scrapes_every_process_where_it_serves_metrics() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    jobs = prometheus["scrape_configs"]
    ports = {name: str(c["port"]) for job in jobs for c in job["dns_sd_configs"] for name in c["names"]}
    long = [name for name in OURS if name not in ONCE]
    assert ports == {n: environment(n)[HEALTH.get(n, ("PENSTOCK_STREAM_HEALTH_PORT", ""))[0]] for n in long}
    shown = {job["authorization"]["credentials_file"] for job in jobs if "authorization" in job}
    assert shown == {f"/run/secrets/{secret}" for secret in SERVICES["prometheus"]["secrets"]}
    assert "./deploy/prometheus:/etc/prometheus:ro" in SERVICES["prometheus"]["volumes"]
    assert all((DEPLOY / "prometheus" / file).exists() for file in prometheus["rule_files"])


def test_grafana_loads_the_dashboards_and_shows_alerts_of_prometheus_and_alertmanager() -> None:
    [provider] = yaml.safe_load((DEPLOY / "image/grafana-dashboards.yml").read_text())["providers"]
    mounted = dict(volume.removesuffix(":ro").split(":") for volume in SERVICES["grafana"]["volumes"])
    [folder] = [source for source, target in mounted.items() if target == provider["options"]["path"]]
    assert list((ROOT / folder).glob("*.json"))
    prometheus, manager = yaml.safe_load((DEPLOY / "image/grafana-datasource.yml").read_text())["datasources"]
    assert (prometheus["type"], manager["type"]) == ("prometheus", "alertmanager")
    assert prometheus["jsonData"]["alertmanagerUid"] == manager["uid"]
    scrapes = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert prometheus["jsonData"]["timeInterval"] == scrapes["global"]["scrape_interval"]
    [target] = scrapes["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert (prometheus["url"], manager["url"]) == ("http://prometheus:9090", f"http://{target}")
    for source in (prometheus, manager):
        service = source["url"].removeprefix("http://").partition(":")[0]
        assert set(SERVICES[service]["networks"]) & set(SERVICES["grafana"]["networks"])
    assert set(SERVICES["prometheus"]["networks"]) & set(SERVICES["alertmanager"]["networks"])


def test_alertmanager_reads_the_configuration_that_the_settings_name_and_nobody_else_can() -> None:
    service, made = SERVICES["alertmanager"], SERVICES["alertmanager-config"]
    file, option, owner = made["entrypoint"][3:]
    assert made["entrypoint"][:3] == ["python", "-m", "deploy.alertmanager"]
    assert f"--config.file={file}" in service["command"]
    assert (option, service["user"]) == ("--owner", f"{owner}:{owner}")
    for volumes in (service["volumes"], made["volumes"]):
        mounted = dict(volume.removesuffix(":ro").split(":") for volume in volumes)
        assert mounted["alertmanager-config"] == file.rpartition("/")[0]
    variables = {*environment("alertmanager-config"), *secrets("alertmanager-config")}
    fields = {f"PENSTOCK_ALERTING_{field}".upper() for field in AlertingSettings.model_fields}
    assert {name for name in variables if name.startswith("PENSTOCK_ALERTING_")} == fields
    assert {name for name, field in AlertingSettings.model_fields.items() if "SecretStr" in str(field.annotation)} == {
        name.removeprefix("PENSTOCK_ALERTING_").lower() for name in secrets("alertmanager-config")
    }
    assert environment("alertmanager-config")["PENSTOCK_SECRETS_DIR"] == "/run/secrets"
    assert [n for n, other in SERVICES.items() if "notifications" in other.get("networks", ())] == ["alertmanager"]
    assert COMPOSE["networks"]["alerts"] == {"internal": True}
    assert "ports" not in service, "it has no password"


def test_each_service_uses_a_postgres_login_of_its_role() -> None:
    script = (DEPLOY / "image/postgres-logins.sh").read_text()
    logins = {login: (role, secret) for login, role, secret in re.findall(r"^login (\w+) (\w+) (\w+)$", script, re.M)}
    roles = set(re.findall(r"'(penstock_\w+)'", (DEPLOY / "roles/postgres/1-roles.sql").read_text()))
    held = {}
    for name in WITH_LOGINS:
        login = re.search(r"//(\w+)@postgres/", environment(name)["PENSTOCK_POSTGRES_DSN"])
        assert login is not None
        role, secret = logins[login[1]]
        assert role in roles
        assert secret in SERVICES["postgres"]["secrets"]
        assert variable(name, "PGPASSWORD") == COMPOSE["secrets"][secret]["environment"]
        held[name] = role
    assert held == {
        "migrate": "penstock_owner",
        "demo": "penstock_owner",
        "detect": "penstock_worker",
        "vectors": "penstock_worker",
        "keywords": "penstock_worker",
        "analysis": "penstock_analysis",
        "connectors": "penstock_connectors",
        "canary": "penstock_canaries",
        "query": "penstock_query",
        **dict.fromkeys(ENROL, "penstock_owner"),
    }


KAFKA_USERS = {
    "migrate": "penstock_migrate",
    "demo": "penstock_migrate",
    "detect": "penstock_detect",
    "vectors": "penstock_vectors",
    "keywords": "penstock_keywords",
    "analysis": "penstock_analyse",
    "connectors": "penstock_connect",
    "canary": "penstock_canary",
    "query": "penstock_ask",
    **dict.fromkeys(ENROL, "penstock_migrate"),
}


@pytest.mark.parametrize("name", WITH_LOGINS)
def test_each_service_uses_its_own_kafka_user_over_sasl_ssl(name: str) -> None:
    given, made = environment(name), secrets("kafka-users")
    assert given["PENSTOCK_KAFKA_SECURITY_PROTOCOL"] == "SASL_SSL"
    assert given["PENSTOCK_KAFKA_SASL_USERNAME"] == KAFKA_USERS[name]
    assert variable(name, "PENSTOCK_KAFKA_SASL_PASSWORD") == COMPOSE["secrets"][made[KAFKA_USERS[name]]]["environment"]
    others = {s["environment"] for key, s in COMPOSE["secrets"].items() if key.startswith("kafka_")}
    names = set(re.findall(r"\$\{(\w+)", str(SERVICES[name]["environment"])))
    assert len(names & others) == 1, "another's password"


def variable(name: str, setting: str) -> str:
    """The variable of .env that this setting of a service comes from."""
    [matches] = re.findall(r"\$\{(\w+)", SERVICES[name]["environment"][setting])
    return str(matches)


def test_the_kafka_users_step_creates_every_user_of_the_acl_file() -> None:
    step = SERVICES["kafka-users"]
    users = json.loads((DEPLOY / "roles/kafka/acls.json").read_text())
    assert step["entrypoint"] == ["python", "-m", "deploy.roles.kafka", "--passwords", "/run/secrets"]
    assert set(users) == set(KAFKA_USERS.values())
    assert SERVICES["migrate"]["depends_on"]["kafka-users"] == {"condition": "service_completed_successfully"}
    assert set(secrets("kafka-users")) == set(users), "beside them a settings file could be taken for a password"
    assert variable("kafka-users", "PENSTOCK_KAFKA_SASL_PASSWORD") == COMPOSE["secrets"]["kafka_admin"]["environment"]
    [said] = set(re.findall(r"super\.users=User:(\w+)", KAFKA))
    assert environment("kafka-users")["PENSTOCK_KAFKA_SASL_USERNAME"] == said
    assert unknown(environment("kafka-users")) == []


@pytest.mark.parametrize("name", ["connectors", "canary", "demo"])
def test_each_publishing_service_is_an_enrolled_producer_and_alone_mounts_its_key(name: str) -> None:
    step = SERVICES[f"producer-{name}"]
    assert SERVICES[name]["depends_on"][f"producer-{name}"] == {"condition": "service_completed_successfully"}
    assert step["command"][:3] == ["producer", "add", name]
    holders = {
        other: volume.split(":")[1:]
        for other, service in SERVICES.items()
        for volume in service.get("volumes", ())
        if volume.startswith(f"{name}-key:")
    }
    [[written], [read, mode]] = holders[f"producer-{name}"], holders[name]
    assert set(holders) == {name, f"producer-{name}"}
    assert mode == "ro"
    file = step["command"][step["command"].index("--key-file") + 1].removeprefix(written)
    assert environment(name)["PENSTOCK_KAFKA_SIGNING_KEY_FILE"] == f"{read}{file}"
    assert environment("detect")["PENSTOCK_PRODUCERS"] == "enforce"


KAFKA = (DEPLOY / "image/kafka/server.properties").read_text()


def test_kafka_mounts_the_files_that_its_configuration_names() -> None:
    service = SERVICES["kafka"]
    mounted = dict(volume.removesuffix(":ro").split(":") for volume in service["volumes"])
    assert mounted["./deploy/image/kafka"] == "/mnt/shared/config"
    assert mounted["kafka-certificate"] == "/etc/kafka/certificate"
    for file in ("server.properties", "admin.properties"):
        text = (DEPLOY / "image/kafka" / file).read_text()
        assert set(re.findall(r"directory:([\w/]+):(\w+)", text)) == {("/run/secrets", "kafka_admin")}
        assert set(re.findall(r"(/etc/kafka\S*)/", text)) == {"/etc/kafka/certificate"}
    assert secrets("kafka") == {"kafka_admin": "kafka_admin"}
    assert f"--command-config={mounted['./deploy/image/kafka']}/admin.properties" in service["healthcheck"]["test"]
    assert not [name for name in environment("kafka") if name != "KAFKA_HEAP_OPTS"], "these would overrule the file"


def test_kafkas_message_limit_equals_the_largest_record() -> None:
    names = {int(n) for n in re.findall(r"^(?:message|replica\.fetch)\.max\.bytes=(\d+)$", KAFKA, re.M)}
    assert names == {LARGEST_RECORD_BYTES}


def test_each_server_has_its_own_certificate_and_every_service_trusts_the_authority() -> None:
    module, folder, *servers = SERVICES["certificates"]["entrypoint"][2:]
    assert module == "deploy.certificates"
    made = dict(volume.split(":") for volume in SERVICES["certificates"]["volumes"])
    assert set(made) == {"authority"} | {f"{server.partition('=')[0]}-certificate" for server in servers}
    for volume, place in made.items():
        server = volume.removesuffix("-certificate")
        assert place == (f"{folder}/ca" if volume == "authority" else f"{folder}/{server}")
        if volume != "authority":
            holders = {n for n, s in SERVICES.items() for v in s.get("volumes", ()) if v.startswith(f"{volume}:")}
            assert holders == {"certificates", server}, "a key is its server's alone"
            assert SERVICES[server]["depends_on"] == {"certificates": {"condition": "service_completed_successfully"}}
    ca = "/etc/penstock-ca/ca.crt"
    for name in WITH_LOGINS:
        given = environment(name)
        assert "authority:/etc/penstock-ca:ro" in SERVICES[name]["volumes"]
        assert given["PENSTOCK_KAFKA_SSL_CAFILE"] == given["PENSTOCK_ELASTICSEARCH_CA_CERTS"] == ca
        assert given["PENSTOCK_ELASTICSEARCH_URL"].startswith("https://")
        assert f"sslmode=verify-full&sslrootcert={ca}" in given["PENSTOCK_POSTGRES_DSN"]
    assert f"sslmode=verify-full&sslrootcert={ca}" in SERVICES["grants"]["entrypoint"][1]
    assert environment("elasticsearch-users")["CURL_CA_BUNDLE"] == ca
    for name in ("grants", "elasticsearch-users", "kafka-users"):
        assert "authority:/etc/penstock-ca:ro" in SERVICES[name]["volumes"]


def test_the_extraction_service_has_no_secrets_volumes_or_outbound_network() -> None:
    service, given = SERVICES["extraction"], environment("extraction")
    assert (service["volumes"], service.get("secrets"), service.get("env_file"), service.get("ports")) == ([],) + 3 * (
        None,
    )
    assert all(name.startswith("PENSTOCK_EXTRACTION_") for name in given)
    running = {key: value for key, value in service.items() if key != "build"}
    assert "${" not in str(running), "something of .env"
    assert service["networks"] == ["reading"]
    assert COMPOSE["networks"]["reading"] == {"internal": True}
    beside = {name for name, service in SERVICES.items() if "reading" in service.get("networks", ())}
    assert beside == {"extraction", "connectors", "prometheus"}
    assert (
        environment("connectors")["PENSTOCK_EXTRACTION_URL"] == f"http://extraction:{given['PENSTOCK_EXTRACTION_PORT']}"
    )
    alike = ("PENSTOCK_EXTRACTION_URL", "PENSTOCK_EXTRACTION_HOST", "PENSTOCK_EXTRACTION_PORT")
    assert {n: v for n, v in environment("connectors").items() if "_EXTRACTION_" in n and n not in alike} == {
        n: v for n, v in given.items() if n not in alike
    }


def test_the_extraction_service_has_memory_and_tmp_space_for_all_its_files() -> None:
    service, given = SERVICES["extraction"], environment("extraction")
    limits = ExtractionSettings(at_once=int(given["PENSTOCK_EXTRACTION_AT_ONCE"]))
    [room] = re.findall(r"^/tmp:size=(\d+)m,", service["tmpfs"][0])
    tmp = int(room) * 1024**2
    memory = int(service["deploy"]["resources"]["limits"]["memory"].removesuffix("g")) * 1024**3
    assert (
        tmp
        >= (limits.at_once + limits.waiting) * limits.max_file_bytes + limits.at_once * limits.limits().written_bytes
    )
    assert memory >= limits.at_once * limits.memory_bytes + tmp + 128 * 1024**2


def test_postgres_accepts_only_tls_connections_with_a_password() -> None:
    rules = [line.split() for line in (DEPLOY / "image/postgres-hba.conf").read_text().splitlines() if line[0] != "#"]
    assert {rule[0] for rule in rules} == {"local", "hostssl"}
    assert {rule[-1] for rule in rules if rule[0] == "hostssl"} == {"scram-sha-256"}
    assert "hba_file=/etc/postgres-hba.conf" in SERVICES["postgres"]["command"]
    assert "ssl=on" in SERVICES["postgres"]["command"]


def test_only_services_that_embed_have_the_embedding_api_key() -> None:
    assert {name for name in SERVICES if "OPENAI_API_KEY" in environment(name)} == {
        "migrate",
        "vectors",
        "analysis",
        "query",
    }


def test_elasticsearch_has_security_enabled_and_a_user_for_each_role() -> None:
    assert SERVICES["elasticsearch"]["environment"]["xpack.security.enabled"] == "true"
    assert SERVICES["elasticsearch"]["environment"]["xpack.security.http.ssl.enabled"] == "true"
    assert SERVICES["elasticsearch"]["environment"]["search.max_keep_alive"] == "10m"
    script = (DEPLOY / "image/elasticsearch-users.sh").read_text()
    users = dict(re.findall(r"^user (\w+) (\w+)$", script, re.M))
    assert set(users) == {file.stem for file in (DEPLOY / "roles/elasticsearch").glob("*.json")}
    assert set(users.values()) < set(SERVICES["elasticsearch-users"]["secrets"])
    for name in WITH_LOGINS:
        if name not in {"analysis", "connectors"}:
            assert environment(name)["PENSTOCK_ELASTICSEARCH_USERNAME"] in users
        else:
            assert not [n for n in environment(name) if n.startswith("PENSTOCK_ELASTICSEARCH_USER")]


@pytest.mark.parametrize(
    "name",
    [name for name in OURS if "PENSTOCK_POSTGRES_DSN" in environment(name) and name not in {"analysis", "canary"}],
)
def test_services_that_write_the_audit_trail_have_the_trail_key(name: str) -> None:
    assert SERVICES[name]["environment"].get("PENSTOCK_TRAIL_KEY") == "${TRAIL_KEY:-}"


def test_the_limits_file_is_mounted_and_its_commented_example_is_valid() -> None:
    mounted = dict(interpolated(v, EXAMPLE).removesuffix(":ro").split(":") for v in SERVICES["query"]["volumes"])
    [file] = [source for source, to in mounted.items() if to == environment("query")["PENSTOCK_SERVE_LIMITS_FILE"]]
    text = (ROOT / file).read_text()
    assert parse(text) == (NONE, {})
    example = re.sub(r"^# {3}", "", text, flags=re.M)
    default, tenants = parse(re.sub(r"^# .*", "", example, flags=re.M))
    assert (default.tokens_per_day, default.caller.requests_per_day) == (5_000_000, 5_000)
    assert tenants["acme"].weight == 2
