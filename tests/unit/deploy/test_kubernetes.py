"""deploy/kubernetes: valid by Kubernetes' own schemas, and everything that it names is there, in it or in the code."""

from __future__ import annotations

import json
import re
import tomllib
from ipaddress import ip_network
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from connectors.extraction.settings import ExtractionSettings
from deploy.alertmanager.settings import AlertingSettings
from pipeline.kafka.groups import group
from pipeline.runtime.credentials import SECRETS_DIR
from pipeline.stages.detect import Detect
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.vectors import VectorSink
from query.limits.quotas import NONE, parse
from tests.support.deploy.deploy_kit import (
    DEPLOY,
    ROOT,
    STOP_SECONDS,
    assert_is_a_command,
    assert_settings_take,
    unknown,
)

BASE, PRODUCTION = DEPLOY / "kubernetes/base", DEPLOY / "kubernetes/overlays/production"
COMPONENTS = DEPLOY / "kubernetes/components"
KUBERNETES = "1.33"
Object = dict[str, Any]
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


def _objects(folder: Path, *, after: int = 0) -> list[Object]:
    """The resources of a kustomization, without the first few."""
    named = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"][after:]
    return list(chain.from_iterable(yaml.safe_load_all((folder / name).read_text()) for name in named))


OBJECTS = [*_objects(BASE, after=1), *_objects(COMPONENTS / "kafka-rights"), *_objects(COMPONENTS / "trail-verify")]
TRACES = _objects(COMPONENTS / "traces")
ALERTING = _objects(COMPONENTS / "alerting")
EXAMPLE = list(
    chain.from_iterable(
        yaml.safe_load_all((PRODUCTION / name).read_text())
        for name in ("settings.yaml", "migrate.yaml", "kafka-auth.yaml", "limits.yaml")
    )
)
DEPLOYMENTS = {o["metadata"]["name"]: o for o in OBJECTS if o["kind"] == "Deployment"}
STAGES = {"penstock-detect": Detect, "penstock-vectors": VectorSink, "penstock-keywords": KeywordSink}


def of(kind: str) -> list[Object]:
    return [o for o in OBJECTS if o["kind"] == kind]


def pod(o: Object) -> Object:
    spec = o["spec"].get("jobTemplate", o)["spec"]
    return spec["template"]["spec"]  # type: ignore[no-any-return]


def pods() -> list[Object]:
    return [*DEPLOYMENTS.values(), *of("Job"), *of("CronJob")]


def values(container: Object, *settings: Object) -> dict[str, str]:
    """Return the environment of a process; the values of secrets are made up."""
    results: dict[str, str] = {}
    for setting in settings:
        results |= setting["data"]
    return results | {e["name"]: e.get("value", "secret") for e in container.get("env", ())}


def name(o: Object) -> str:
    return f"{o['kind']}-{o['metadata']['name']}"


SETTINGS = next(o for o in OBJECTS if name(o) == "ConfigMap-penstock-settings")
HERE = next(o for o in EXAMPLE if name(o) == "ConfigMap-penstock-settings")


def validate(o: Object) -> None:
    """By Kubernetes' own schemas. Raises ValidationError of jsonschema."""
    import kubernetes_validate  # takes a second, which not every process that collects this file should pay

    kubernetes_validate.validate(o, KUBERNETES, strict=True)


@pytest.mark.heavy
@pytest.mark.parametrize("o", [o for o in (*OBJECTS, *TRACES, *ALERTING) if "keda" not in o["apiVersion"]], ids=name)
def test_every_object_is_valid_by_the_kubernetes_schema(o: Object) -> None:
    validate(o)


def test_the_schema_validation_rejects_an_unknown_field() -> None:
    from jsonschema import ValidationError

    wrong = yaml.safe_load(yaml.safe_dump(DEPLOYMENTS["penstock-query"]))
    pod(wrong)["containers"][0]["readinessprobe"] = {}
    with pytest.raises(ValidationError):
        validate(wrong)


@pytest.mark.parametrize("folder", [BASE, PRODUCTION, *sorted(COMPONENTS.iterdir())], ids=lambda folder: folder.name)
def test_every_kustomization_names_exactly_the_existing_files(folder: Any) -> None:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    parts = [
        *kustomization.get("components", ()),
        *re.findall(r"# - (\S+)", (folder / "kustomization.yaml").read_text()),
    ]
    named = [*kustomization.get("resources", ()), *(p["path"] for p in kustomization.get("patches", ())), *parts]
    assert all((folder / path).exists() for path in named)
    assert {p.name for p in folder.glob("*.yaml")} == {n for n in named if n.endswith(".yaml")} | {"kustomization.yaml"}
    [grants] = yaml.safe_load((DEPLOY / "roles/kustomization.yaml").read_text())["configMapGenerator"]
    assert all((DEPLOY / "roles" / file).exists() for file in grants["files"])


READER = "penstock-extraction"
"""It has no secret, and is told nothing of the others."""
READING = next(o for o in OBJECTS if name(o) == "ConfigMap-penstock-extraction")


@pytest.mark.parametrize("o", pods(), ids=name)
def test_every_environment_variable_is_a_setting_with_a_valid_value(
    o: Object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    documented = secrets().get(o["metadata"]["name"], [])
    assert bool(documented) is (o["metadata"]["name"] != READER)
    assert unknown(documented) == []
    for key in documented:
        (tmp_path / key).write_text("secret" * 6)  # some have to be long
    for container in [*pod(o).get("initContainers", ()), *pod(o)["containers"]]:
        for settings in ([SETTINGS, READING], [SETTINGS, READING, HERE]):
            given = values(container, *([READING] if o["metadata"]["name"] == READER else settings))
            assert unknown(given) == []
            if container["image"] == "penstock":
                assert_settings_take(given | {SECRETS_DIR: str(tmp_path)}, monkeypatch)


def secrets() -> dict[str, list[str]]:
    """The secrets of our processes, and their keys, as docs/deploy.md tells an operator to make them."""
    rows = re.findall(r"\| `(penstock-[a-z-]+)` \| (.*?) \|", (ROOT / "docs/deploy.md").read_text())
    return {name: re.findall(r"`(PENSTOCK_\w+)`", keys) for name, keys in rows if "PENSTOCK_" in keys}


def test_only_processes_that_embed_have_the_embedding_api_key() -> None:
    given = {secret for secret, keys in secrets().items() if "PENSTOCK_EMBEDDING_API_KEY" in keys}
    assert given == {"penstock-migrate", "penstock-vectors", "penstock-analysis", "penstock-query"}


@pytest.mark.parametrize("o", [o for o in pods() if o["metadata"]["name"] != READER], ids=name)
def test_every_process_mounts_only_its_own_secret(o: Object) -> None:
    [volume] = [v for v in pod(o)["volumes"] if v["name"] == "secrets"]
    assert volume["secret"] == {"secretName": o["metadata"]["name"], "defaultMode": 0o440}
    assert pod(o)["securityContext"]["fsGroup"] == pod(o)["securityContext"]["runAsGroup"]
    for container in [*pod(o).get("initContainers", ()), *pod(o)["containers"]]:
        if container["image"] != "penstock":
            continue
        [mount] = [m for m in container["volumeMounts"] if m["name"] == "secrets"]
        assert {e["name"]: e.get("value") for e in container["env"]}[SECRETS_DIR] == mount["mountPath"]
        assert not [e for e in container["env"] if "valueFrom" in e], "a secret in an environment"


def test_every_variable_of_the_examples_credentials_is_a_setting() -> None:
    text = (PRODUCTION / "credentials.yaml").read_text() + (PRODUCTION / "migrate.yaml").read_text()
    assert unknown(re.findall(r"PENSTOCK_\w+", text)) == []


@pytest.mark.parametrize("o", pods(), ids=name)
def test_every_pod_drops_privileges_and_has_limits(o: Object) -> None:
    spec = pod(o)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {v["name"] for v in spec["volumes"]}
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {m["name"] for m in container["volumeMounts"]} <= volumes
        assert container["resources"]["requests"]
        assert container["resources"]["limits"]["memory"]
        assert "." not in container["image"].split("/")[0], "no registry"


LOG_BYTES = 64 * 1024**2
"""The kubelet keeps five files of 10 MiB of a container's output, and a little more until it begins the next."""


@pytest.mark.parametrize("o", pods(), ids=name)
def test_every_pod_may_fill_its_tmp_and_its_logs_before_it_is_evicted(o: Object) -> None:
    spec = pod(o)
    limits = {
        key: [in_bytes(container["resources"]["limits"]["ephemeral-storage"]) for container in spec.get(key, ())]
        for key in ("initContainers", "containers")
    }
    assert all(container["resources"]["requests"]["ephemeral-storage"] for container in spec["containers"])
    of_the_pod = max(*limits["initContainers"], sum(limits["containers"]), 0)
    volumes = sum(in_bytes(v["emptyDir"]["sizeLimit"]) for v in spec["volumes"] if "emptyDir" in v)
    assert of_the_pod >= volumes + LOG_BYTES
    assert all(limit >= LOG_BYTES for limit in (*limits["initContainers"], *limits["containers"]))


def in_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * {"Gi": 1024**3, "Mi": 1024**2}[quantity[-2:]]


def test_the_base_has_the_version_of_the_project_and_the_example_pins_every_image_by_digest() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    [base] = yaml.safe_load((BASE / "kustomization.yaml").read_text())["images"]
    assert base == {"name": "penstock", "newTag": version}
    [example] = yaml.safe_load((PRODUCTION / "kustomization.yaml").read_text())["images"]
    assert example["newTag"] == version
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", example["digest"])
    images = {c["image"] for o in pods() for c in [*pod(o).get("initContainers", ()), *pod(o)["containers"]]}
    assert all("@sha256:" in image for image in images - {"penstock"})


def test_every_ignored_finding_of_kube_score_has_its_reason_in_a_comment() -> None:
    for file in (DEPLOY / "kubernetes").rglob("*.yaml"):
        lines = file.read_text().splitlines()
        for before, line in pairwise(lines):
            assert "kube-score/ignore" not in line or before.strip().startswith("# "), f"{file.name}: {line}"


@pytest.mark.parametrize("o", DEPLOYMENTS.values(), ids=name)
def test_deployments_use_existing_commands_probe_paths_ports_and_grace_periods(o: Object) -> None:
    spec = pod(o)
    [container] = spec["containers"]
    assert_is_a_command(container["args"])
    of_workers = ("PENSTOCK_STREAM_HEALTH_PORT", "pipeline/runtime/health.py")
    setting, expected = {
        "query": ("PENSTOCK_SERVE_PORT", "query/http/health.py"),
        "extraction": ("PENSTOCK_EXTRACTION_PORT", "connectors/extraction/service.py"),
    }.get(container["name"], of_workers)
    ports = {p["name"]: str(p["containerPort"]) for p in container["ports"]}
    value = values(container, SETTINGS)[setting]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        http = container[probe]["httpGet"]
        assert ports[http["port"]] == value
        assert f'"{http["path"]}"' in (ROOT / expected).read_text()
    noted = o["spec"]["template"]["metadata"].get("annotations", {})
    assert noted.get("prometheus.io/port") == (None if container["name"] == "query" else value)
    if o["metadata"]["name"] in STAGES:
        assert spec["terminationGracePeriodSeconds"] > STOP_SECONDS
    labels = o["spec"]["template"]["metadata"]["labels"]
    for selector in [o["spec"]["selector"], *(t["labelSelector"] for t in spec["topologySpreadConstraints"])]:
        assert selector["matchLabels"].items() <= labels.items()


def test_every_selector_of_services_budgets_policies_and_scalers_matches_a_workload() -> None:
    jobs = [job["metadata"]["name"] for job in of("Job")]
    assert jobs == ["penstock-migrate", "penstock-kafka-rights"]
    jobs += [job["metadata"]["name"] for job in of("CronJob")]
    labels = {name: {"app.kubernetes.io/name": name} for name in [*DEPLOYMENTS, *jobs]}
    for service in of("Service"):
        of_it = service["spec"]["selector"]["app.kubernetes.io/name"]
        ports = {p["name"] for p in pod(DEPLOYMENTS[of_it])["containers"][0]["ports"]}
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= ports
    budgets = [b["spec"]["selector"]["matchLabels"] for b in of("PodDisruptionBudget")]
    assert budgets == [labels[name] for name in DEPLOYMENTS]
    policies = [p["spec"]["podSelector"] for p in of("NetworkPolicy")[1:]]
    assert sorted(str(p["matchLabels"]) for p in policies if "matchLabels" in p) == sorted(map(str, labels.values()))
    listed = [set(p["matchExpressions"][0]["values"]) for p in policies if "matchExpressions" in p]
    assert set().union(*listed) <= set(labels)
    scaled = [
        s["spec"]["scaleTargetRef"]["name"] for kind in ("ScaledObject", "HorizontalPodAutoscaler") for s in of(kind)
    ]
    alone = {"penstock-analysis", "penstock-connectors", "penstock-canary", READER}
    assert sorted(scaled) == sorted(set(DEPLOYMENTS) - alone)
    assert all("replicas" not in DEPLOYMENTS[name]["spec"] for name in scaled), "an apply would undo the autoscaler"


@pytest.mark.parametrize("scaled", of("ScaledObject"), ids=name)
def test_autoscaling_uses_the_lag_of_the_stages_own_group_and_topics(scaled: Object) -> None:
    stage = STAGES[scaled["spec"]["scaleTargetRef"]["name"]]
    triggers = [t["metadata"] for t in scaled["spec"]["triggers"]]
    assert {t["consumerGroup"] for t in triggers} == {group(stage.name)}  # type: ignore[attr-defined]
    assert {t["topic"] for t in triggers} == {topic.name for topic in stage.topics.values()}  # type: ignore[attr-defined]
    assert scaled["spec"]["maxReplicaCount"] == min(topic.partitions for topic in stage.topics.values())  # type: ignore[attr-defined]


def reach(policies: list[Object]) -> dict[str, set[str]]:
    """Kinds of servers → the processes that may reach them, by the policies that list their addresses."""
    lists = {p["metadata"]["name"].removeprefix("penstock-to-"): p["spec"] for p in policies if "-to-" in name(p)}
    return {kind: set(spec["podSelector"]["matchExpressions"][0]["values"]) for kind, spec in lists.items()}


def test_network_policies_permit_only_dns_by_default() -> None:
    open_to = {p["metadata"]["name"]: p["spec"].get("egress") for p in of("NetworkPolicy")}
    [names] = open_to.pop("penstock-default")
    assert {p["port"] for p in names["ports"]} == {53}
    [reader] = open_to.pop("penstock-connectors")
    assert reader["to"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": READER}}}]
    assert not any(open_to.values())
    default = of("NetworkPolicy")[0]["spec"]
    assert default["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in default
    assert default["podSelector"] == {
        "matchLabels": {"app.kubernetes.io/part-of": "penstock"},
        "matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "NotIn", "values": [READER]}],
    }


def selects(policy: Object, labels: dict[str, str]) -> bool:
    selector = policy["spec"]["podSelector"]
    is_in = {"In": True, "NotIn": False}
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        (labels[e["key"]] in e["values"]) is is_in[e["operator"]] for e in selector.get("matchExpressions", ())
    )


def test_the_extraction_service_has_no_secrets_no_egress_and_only_connectors_as_clients() -> None:
    spec = pod(DEPLOYMENTS[READER])
    [container] = spec["containers"]
    assert [set(v) - {"name"} for v in spec["volumes"]] == [{"emptyDir"}]
    assert container["envFrom"] == [{"configMapRef": {"name": READER}}]
    assert all("valueFrom" not in e for e in container["env"])
    given = values(container, READING)
    assert all(variable.startswith("PENSTOCK_EXTRACTION_") for variable in given)
    others = {pod(o)["securityContext"].get("runAsUser") for o in pods() if o["metadata"]["name"] != READER}
    assert spec["securityContext"]["runAsUser"] not in others
    labels = DEPLOYMENTS[READER]["spec"]["template"]["metadata"]["labels"] | {"app.kubernetes.io/part-of": "penstock"}
    selecting = [p["metadata"]["name"] for p in [*of("NetworkPolicy"), *TRACES] if selects(p, labels)]
    assert selecting == [READER], "policies add up"
    [mine] = [p["spec"] for p in of("NetworkPolicy") if p["metadata"]["name"] == READER]
    assert (mine["policyTypes"], mine["egress"]) == (["Ingress", "Egress"], [])
    [ingress] = mine["ingress"]
    assert ingress["from"] == [
        {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "penstock-connectors"}}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
    ]
    assert [str(p["port"]) for p in ingress["ports"]] == [given["PENSTOCK_EXTRACTION_PORT"]]


def test_the_connectors_use_the_extraction_service_and_share_its_settings() -> None:
    [container] = pod(DEPLOYMENTS["penstock-connectors"])["containers"]
    [service] = [s for s in of("Service") if s["metadata"]["name"] == READER]
    url = f"http://{READER}:{service['spec']['ports'][0]['port']}"
    assert values(container)["PENSTOCK_EXTRACTION_URL"] == url
    assert {"configMapRef": {"name": READER}} in container["envFrom"]


def test_upload_quotas_are_smaller_than_the_volume_and_a_tenants_than_the_total() -> None:
    spec = pod(DEPLOYMENTS["penstock-connectors"])
    given = values(spec["containers"][0])
    everybody, tenant = (int(given[f"PENSTOCK_UPLOADS_{whose}_BYTES"]) for whose in ("ALL", "TENANT"))
    [claim] = [v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v]
    [volume] = [v for v in of("PersistentVolumeClaim") if v["metadata"]["name"] == claim]
    size = volume["spec"]["resources"]["requests"]["storage"]
    assert size.endswith("Gi")
    assert 0 < tenant <= everybody / 2
    assert everybody <= 0.6 * int(size[:-2]) * 1024**3, "clones of repositories and files under way lie there, too"


def test_the_extraction_service_has_memory_and_tmp_space_for_all_its_files() -> None:
    spec = pod(DEPLOYMENTS[READER])
    limits = ExtractionSettings(at_once=int(READING["data"]["PENSTOCK_EXTRACTION_AT_ONCE"]))
    sizes = {"Gi": 1024**3, "Mi": 1024**2}
    memory, room = spec["containers"][0]["resources"]["limits"]["memory"], spec["volumes"][0]["emptyDir"]["sizeLimit"]
    assert int(memory[:-2]) * sizes[memory[-2:]] >= limits.at_once * limits.memory_bytes + 256 * 1024**2
    assert int(room[:-2]) * sizes[room[-2:]] >= (
        (limits.at_once + limits.waiting) * limits.max_file_bytes + limits.at_once * limits.limits().written_bytes
    )


def test_the_example_egress_lists_narrow_networks_for_every_kind_of_server() -> None:
    kinds = reach(of("NetworkPolicy"))
    listed = {p["metadata"]["name"]: p["spec"] for p in yaml.safe_load_all((PRODUCTION / "egress.yaml").read_text())}
    assert set(listed) == {f"penstock-to-{kind}" for kind in kinds}
    policies = {p["metadata"]["name"]: p for p in of("NetworkPolicy")}
    for kind, spec in listed.items():
        validate(policies[kind] | {"spec": policies[kind]["spec"] | spec})
    for file in [*BASE.glob("*.yaml"), *COMPONENTS.rglob("*.yaml"), *PRODUCTION.glob("*.yaml")]:
        for cidr in re.findall(r"cidr: *([^ ,}]+)", file.read_text()):
            network = ip_network(cidr)
            assert network.prefixlen >= 16, f"{file.name} opens {cidr}"
            assert not network.overlaps(ip_network("169.254.0.0/16")), (
                f"{file.name} opens where clouds keep credentials"
            )


def test_the_example_trusts_only_narrow_proxy_networks_and_the_base_none() -> None:
    trusted = [ip_network(network) for network in json.loads(HERE["data"]["PENSTOCK_PORTS_TRUSTED_PROXIES"])]
    assert trusted
    assert all(network.prefixlen >= 24 for network in trusted), "as wide as a network of pods"
    assert "PENSTOCK_PORTS_TRUSTED_PROXIES" not in SETTINGS["data"], "nobody is believed until somebody lists it"


def test_cilium_name_policies_select_the_same_processes_as_the_address_policies() -> None:
    dns, *named = yaml.safe_load_all((COMPONENTS / "cilium-names/names.yaml").read_text())
    kinds = reach(of("NetworkPolicy"))
    who = {}
    for policy in named:
        selector = policy["spec"]["endpointSelector"]
        labels = selector.get("matchLabels", {}).values()
        who[policy["metadata"]["name"].removeprefix("penstock-to-")] = {
            *labels,
            *(value for expression in selector.get("matchExpressions", ()) for value in expression["values"]),
        }
        assert all(p["port"] == "443" for e in policy["spec"]["egress"] for to in e["toPorts"] for p in to["ports"])
        assert all(
            "*" not in n.get("matchPattern", "").lstrip("*.") for e in policy["spec"]["egress"] for n in e["toFQDNs"]
        )
    assert who == {kind: kinds[kind] for kind in ("sources", "models")}
    assert set(dns["spec"]["endpointSelector"]["matchExpressions"][0]["values"]) == set().union(*who.values())


def test_each_process_reaches_only_its_own_servers_and_workers_admit_only_prometheus() -> None:
    policies = {p["metadata"]["name"]: p["spec"] for p in of("NetworkPolicy")}
    kinds = reach(of("NetworkPolicy"))
    assert {kind for kind, who in kinds.items() if "penstock-connectors" in who} == {"kafka", "postgres", "sources"}
    assert {kind for kind, who in kinds.items() if "penstock-detect" in who} == {"kafka", "postgres", "elasticsearch"}
    assert {kind for kind, who in kinds.items() if "penstock-vectors" in who} == {"kafka", "postgres", "models"}
    assert {kind for kind, who in kinds.items() if "penstock-keywords" in who} == {"kafka", "postgres", "elasticsearch"}
    assert {kind for kind, who in kinds.items() if "penstock-analysis" in who} == {"kafka", "postgres", "models"}
    for worker in (*STAGES, "penstock-analysis"):
        [ingress] = policies[worker]["ingress"]
        assert ingress["ports"] == [{"protocol": "TCP", "port": 8000}]


def test_the_kafka_rights_job_runs_the_tested_program_and_reaches_only_kafka() -> None:
    [job] = [job for job in of("Job") if job["metadata"]["name"] == "penstock-kafka-rights"]
    [container] = pod(job)["containers"]
    assert container["command"] == ["python", "-m", "deploy.roles.kafka"]
    [policy] = [p["spec"] for p in of("NetworkPolicy") if p["metadata"]["name"] == "penstock-kafka-rights"]
    assert policy["ingress"] == []
    assert [kind for kind, who in reach(of("NetworkPolicy")).items() if "penstock-kafka-rights" in who] == ["kafka"]
    arguments, mount, volume = (
        item["value"] for item in yaml.safe_load((COMPONENTS / "kafka-users/passwords.yaml").read_text())
    )
    assert arguments == ["--passwords", mount["mountPath"]]
    assert mount["name"] == volume["name"]
    pod(changed := yaml.safe_load(yaml.safe_dump(job)))["containers"][0]["args"] = arguments
    pod(changed)["containers"][0]["volumeMounts"].append(mount)
    pod(changed)["volumes"].append(volume)
    validate(changed)


def test_the_trail_verification_job_reaches_only_postgres_and_has_an_alert() -> None:
    [job] = of("CronJob")
    assert_is_a_command(pod(job)["containers"][0]["args"])
    assert job["spec"]["jobTemplate"]["spec"]["backoffLimit"] == 0, "what was found once is told"
    assert [kind for kind, who in reach(of("NetworkPolicy")).items() if job["metadata"]["name"] in who] == ["postgres"]
    [rule] = [rule for rule in RULES if rule["alert"] == "PenstockTrailNotVerified"]
    assert f'cronjob="{job["metadata"]["name"]}"' in rule["expr"]


def test_alertmanager_has_the_image_of_compose_a_configuration_of_the_secret_and_only_prometheus_as_client() -> None:
    [stateful, service, ingress, egress] = ALERTING
    spec = stateful["spec"]["template"]["spec"]
    [made], [container] = spec["initContainers"], spec["containers"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["alertmanager"]
    assert container["image"] == compose["image"]
    assert container["args"] == compose["command"]
    assert made["command"][:3] == ["python", "-m", "deploy.alertmanager"]
    assert f"--config.file={made['command'][3]}" in container["args"]
    assert values(made)[SECRETS_DIR] in {m["mountPath"] for m in made["volumeMounts"] if m["name"] == "secrets"}
    assert not [m for m in container["volumeMounts"] if m["name"] == "secrets"]
    assert spec["securityContext"]["runAsUser"] not in {10001, 10002}, "its configuration holds secrets"
    for process in (made, container):
        assert process["securityContext"] == pod(DEPLOYMENTS["penstock-query"])["containers"][0]["securityContext"]
        assert {"memory", "ephemeral-storage"} <= set(process["resources"]["limits"])
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert [o["spec"]["podSelector"]["matchLabels"] for o in (ingress, egress)] == [labels, labels]
    assert service["spec"]["selector"] == labels
    [rule] = ingress["spec"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert [p["port"] for p in rule["ports"]] == [container["ports"][0]["containerPort"]]
    assert egress["spec"] == {"podSelector": {"matchLabels": labels}, "policyTypes": ["Egress"], "egress": []}
    guide = (ROOT / "docs/deploy.md").read_text()
    named = {f"PENSTOCK_ALERTING_{field}".upper() for field in AlertingSettings.model_fields}
    assert {name for name in named if f"`{name}`" in guide} == named - {"PENSTOCK_ALERTING_SMTP_REQUIRE_TLS"}


def test_traces_are_off_by_default_and_their_policy_opens_only_the_collector() -> None:
    [policy] = TRACES
    assert policy["spec"]["podSelector"] == of("NetworkPolicy")[0]["spec"]["podSelector"]
    [settings] = yaml.safe_load_all((COMPONENTS / "traces/settings.yaml").read_text())
    port = settings["data"]["OTEL_EXPORTER_OTLP_ENDPOINT"].rpartition(":")[2]
    assert [p["port"] for e in policy["spec"]["egress"] for p in e["ports"]] == [int(port)]
    assert all("namespaceSelector" in to for e in policy["spec"]["egress"] for to in e["to"])
    assert not [key for key in SETTINGS["data"] | HERE["data"] if key.startswith("OTEL_")], "off unless asked for"


def test_the_deployment_guide_names_every_secret() -> None:
    named = set(
        re.findall(
            r"(?:secretKeyRef: \{name|secretName): ([\w-]+)",
            "".join(p.read_text() for p in [*BASE.glob("*.yaml"), *COMPONENTS.rglob("*.yaml")]),
        )
    )
    named |= set(
        re.findall(
            r"secret(?:Ref|Name|KeyRef)?: \{?(?:name: )?(penstock-[\w-]+)",
            "".join(p.read_text() for p in PRODUCTION.glob("*.yaml")),
        )
    )
    guide = (ROOT / "docs/deploy.md").read_text()
    assert {*(o["metadata"]["name"] for o in pods()), "penstock-keys"} - {READER} <= named
    assert not [secret for secret in sorted(named) if f"`{secret}`" not in guide]


def test_the_query_service_reads_tenant_limits_from_the_overlays_config_map() -> None:
    spec = pod(DEPLOYMENTS["penstock-query"])
    [container] = spec["containers"]
    [path] = [e["value"] for e in container["env"] if e["name"] == "PENSTOCK_SERVE_LIMITS_FILE"]
    [volume] = [m["name"] for m in container["volumeMounts"] if path.startswith(f"{m['mountPath']}/")]
    [source] = [v["configMap"]["name"] for v in spec["volumes"] if v["name"] == volume]
    texts = [
        next(o for o in objects if name(o) == f"ConfigMap-{source}")["data"][Path(path).name]
        for objects in (OBJECTS, EXAMPLE)
    ]
    assert parse(texts[0]) == (NONE, {})
    assert parse(texts[1])[0].tokens_per_day
