"""The chart's values: what may be set, its default in the manifests of deploy/kubernetes, and what it means.

``values.yaml`` and ``values.schema.json`` of the chart are written from this model, with its docstrings.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from deploy.helm.source import Object, containers, labelled, read, template_of

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
OptionalName = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")] | int
Variable = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
"""The name of an environment variable."""
Variables = Annotated[dict[Variable, str], Field(json_schema_extra={"additionalProperties": False})]
Rules = list[dict[str, Any]]
"""Rules of a NetworkPolicy, in Kubernetes' own form."""


class Part(BaseModel):
    """A part of the values: its keys are written in camelCase, and an unknown one is rejected."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True
    )


class Image(Part):
    name: str = Field("penstock", min_length=1)
    """Where the cluster pulls the image from that you built with deploy/Dockerfile."""
    tag: str = Field("", pattern=r"^[A-Za-z0-9_.-]*$")
    """Empty: the chart's version."""
    digest: str = Field("", pattern=r"^(sha256:[0-9a-f]{64})?$")
    """Decides what runs, whatever the tag names later; `docker buildx imagetools inspect NAME:TAG` prints it."""
    pull_secrets: list[Name] = []
    """Secrets of the registry."""


class Amounts(Part):
    model_config = ConfigDict(alias_generator=None)

    cpu: Quantity | None = None
    memory: Quantity | None = None
    ephemeral_storage: Quantity | None = Field(None, alias="ephemeral-storage")


class Resources(Part):
    """Requests and limits of a container. Processors have no limit: it would only throttle."""

    requests: Amounts = Amounts()
    limits: Amounts = Amounts()


class Process(Part):
    secret: Name
    """The secret with its credentials (the guide lists the keys of each)."""
    resources: Resources


class Migrate(Process):
    grants_image: str = Field(min_length=1)
    """An image with psql, which sets the rights of the roles after each migration."""
    grants_resources: Resources


class Scaled(Process):
    min_replicas: int = Field(ge=1)
    max_replicas: int = Field(ge=1)


class Connectors(Process):
    sources_secret: Name
    """Its keys become variables of the connectors: the tokens of sources. It need not exist."""
    declared: str
    """The content of connectors.toml."""
    storage: Quantity
    """The volume for uploads and clones of repositories. Raise the two limits of uploads in `settings` with it."""
    storage_class: OptionalName = ""
    """Empty: the cluster's default."""


class Query(Scaled):
    keys_secret: Name
    """The secret with keys.toml, the API keys of callers."""
    limits: str
    """The content of limits.toml: daily budgets of tenants and callers."""


class Extraction(Part):
    replicas: int = Field(ge=1)
    resources: Resources
    settings: Variables
    """Its settings, which the connectors share."""


class Keda(Part):
    enabled: bool = True
    """Whether KEDA scales the workers by their lag; else each kind has `minReplicas` processes."""
    secret: OptionalName = ""
    """The secret with which KEDA logs in to Kafka: keys sasl, username, password, tls, ca. Empty: without a login."""


class Egress(Part):
    """The servers that Penstock may reach, by their kind. An empty list: none."""

    kafka: Rules = []
    postgres: Rules = []
    elasticsearch: Rules = []
    models: Rules = []
    issuer: Rules = []
    """The issuer of callers' tokens."""
    sources: Rules = []


class Namespaces(Part):
    """The namespaces that network policies admit."""

    dns: Name = "kube-system"
    monitoring: Name = "monitoring"
    ingress: Name = "ingress"


class KafkaRights(Part):
    enabled: bool = False
    """Whether a job sets the rights of Penstock's users in a Kafka with an authorizer, at every upgrade."""
    secret: Name
    """The login of one of Kafka's super.users."""
    users_secret: OptionalName = ""
    """For a Kafka that stores its users (SCRAM-SHA-512): the secret with a password for each. Empty: it stores none."""
    resources: Resources


class Alerting(Process):
    enabled: bool = False
    """Whether an Alertmanager notifies people; the secret has its receivers."""
    image: str = Field(min_length=1)
    alertmanager_resources: Resources
    storage: Quantity
    """The volume for what was sent and what is silenced."""
    receivers: Rules = []
    """The webhooks and the mail server, as in `egress`."""


class TrailVerify(Process):
    enabled: bool = False
    """Whether the audit trail is checked every night."""
    schedule: str


class Traces(Part):
    enabled: bool = False
    endpoint: str = Field(pattern=r"^https?://[^/:]+:[0-9]+$")
    """The collector, with its port."""
    namespace: Name
    pod_labels: dict[str, str]
    """The labels of the collector's pods."""


class CiliumNames(Part):
    """For clusters with Cilium: sources and models by name (`matchName`, `matchPattern`)."""

    enabled: bool = False
    sources: list[dict[str, str]]
    models: list[dict[str, str]]


class ServiceAccount(Part):
    annotations: dict[str, str] = {}


class Values(Part):
    """Values of Penstock's chart."""

    image: Image = Image()
    settings: Variables
    """Settings of all processes, described in pipeline/runtime/settings.py and query/settings.py; no secrets."""
    migrate: Migrate
    detect: Scaled
    vectors: Scaled
    keywords: Scaled
    analysis: Process
    connectors: Connectors
    extraction: Extraction
    canary: Process
    query: Query
    keda: Keda = Keda()
    egress: Egress = Egress()
    namespaces: Namespaces = Namespaces()
    certificate_authority: OptionalName = ""
    """A ConfigMap with ca.crt, which signed the servers' certificates: mounted as /etc/penstock-ca/ca.crt."""
    kafka_rights: KafkaRights
    alerting: Alerting
    trail_verify: TrailVerify
    traces: Traces
    cilium_names: CiliumNames
    service_account: ServiceAccount = ServiceAccount()
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []
    global_: dict[str, Any] = Field({}, alias="global")
    """Helm's own, for a chart that contains this one. Nothing here is read."""


def defaults() -> Values:
    """The values with which the chart renders to the base of deploy/kubernetes."""
    files = (
        "settings",
        "migrate",
        "workers",
        "analysis",
        "connectors",
        "extraction",
        "canary",
        "query",
        "autoscaling",
    )
    objects = {(o["kind"], o["metadata"]["name"]): o for file in files for o in labelled(f"base/{file}.yaml")}

    def process(kind: str, name: str) -> dict[str, Any]:
        o = objects[kind, f"penstock-{name}"]
        return {"secret": _secret(o, "secrets"), "resources": _resources(o)}

    def scaled(name: str) -> dict[str, Any]:
        scaler = objects["ScaledObject", f"penstock-{name}"]["spec"]
        least, most = scaler["minReplicaCount"], scaler["maxReplicaCount"]
        return process("Deployment", name) | {"min_replicas": least, "max_replicas": most}

    job = objects["Job", "penstock-migrate"]
    [grants] = [c for c in _containers(job) if c["name"] == "grants"]
    volume = objects["PersistentVolumeClaim", "penstock-connectors"]["spec"]
    scaler = objects["HorizontalPodAutoscaler", "penstock-query"]["spec"]
    [rights] = labelled("components/kafka-rights/job.yaml")
    [verify] = labelled("components/trail-verify/cronjob.yaml")
    alertmanager, _ = labelled("components/alerting/alertmanager.yaml")
    [volume_claim] = alertmanager["spec"]["volumeClaimTemplates"]
    [traces] = read("components/traces/settings.yaml")
    [collector] = read("components/traces/network.yaml")[0]["spec"]["egress"][0]["to"]
    _, sources, models = read("components/cilium-names/names.yaml")
    return Values.model_validate(
        {
            "settings": objects["ConfigMap", "penstock-settings"]["data"],
            "migrate": process("Job", "migrate")
            | {"grants_image": grants["image"], "grants_resources": grants["resources"]},
            **{name: scaled(name) for name in ("detect", "vectors", "keywords")},
            "analysis": process("Deployment", "analysis"),
            "connectors": process("Deployment", "connectors")
            | {
                "sources_secret": _sources_secret(objects["Deployment", "penstock-connectors"]),
                "storage": volume["resources"]["requests"]["storage"],
                "declared": objects["ConfigMap", "penstock-connectors"]["data"]["connectors.toml"],
            },
            "extraction": {
                "replicas": objects["Deployment", "penstock-extraction"]["spec"]["replicas"],
                "resources": _resources(objects["Deployment", "penstock-extraction"]),
                "settings": objects["ConfigMap", "penstock-extraction"]["data"],
            },
            "canary": process("Deployment", "canary"),
            "query": process("Deployment", "query")
            | {
                "keys_secret": _secret(objects["Deployment", "penstock-query"], "keys"),
                "min_replicas": scaler["minReplicas"],
                "max_replicas": scaler["maxReplicas"],
                "limits": objects["ConfigMap", "penstock-limits"]["data"]["limits.toml"],
            },
            "kafka_rights": {"secret": _secret(rights, "secrets"), "resources": _resources(rights)},
            "alerting": {
                "secret": _secret(alertmanager, "secrets"),
                "resources": _resources(alertmanager),
                "image": _containers(alertmanager)[1]["image"],
                "alertmanager_resources": _containers(alertmanager)[1]["resources"],
                "storage": volume_claim["spec"]["resources"]["requests"]["storage"],
            },
            "trail_verify": {
                "secret": _secret(verify, "secrets"),
                "resources": _resources(verify),
                "schedule": verify["spec"]["schedule"],
            },
            "traces": {
                "endpoint": traces["data"]["OTEL_EXPORTER_OTLP_ENDPOINT"],
                "namespace": collector["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"],
                "pod_labels": collector["podSelector"]["matchLabels"],
            },
            "cilium_names": {
                "sources": sources["spec"]["egress"][0]["toFQDNs"],
                "models": models["spec"]["egress"][0]["toFQDNs"],
            },
        }
    )


def _secret(o: Object, volume: str) -> str:
    """The name of the secret in a volume of an object's pods."""
    template = template_of(o)
    assert template is not None
    [name] = [v["secret"]["secretName"] for v in template["spec"]["volumes"] if v["name"] == volume]
    assert isinstance(name, str)
    return name


def _sources_secret(o: Object) -> str:
    """The name of the secret whose keys become variables."""
    [name] = [source["secretRef"]["name"] for source in _containers(o)[0]["envFrom"] if "secretRef" in source]
    assert isinstance(name, str)
    return name


def _containers(o: Object) -> list[Object]:
    template = template_of(o)
    assert template is not None
    return containers(template["spec"])


def _resources(o: Object) -> Object:
    """The requests and limits of an object's first container."""
    resources: Object = _containers(o)[0]["resources"]
    return resources
