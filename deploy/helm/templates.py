"""The chart's templates, made from the manifests of deploy/kubernetes: each fact that a value may change is marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deploy.helm.marks import Marks, dump
from deploy.helm.source import Object, containers, grants, labelled, read, template_of

LABEL = "kubernetes.io/metadata.name"
WORKERS = ("detect", "vectors", "keywords")


@dataclass(frozen=True, slots=True)
class Template:
    """One file of the chart's templates."""

    name: str
    origin: str
    """Where its objects come from, for the reader."""
    objects: Callable[[], list[Object]]
    condition: str = ""
    """An expression that has to be true for its objects to be there."""


def _of(*paths: str) -> Callable[[], list[Object]]:
    return lambda: [o for path in paths for o in labelled(path)]


def _base(name: str, *, condition: str = "") -> Template:
    path = f"base/{name}.yaml"
    return Template(name, f"deploy/kubernetes/{path}", _of(path), condition)


TEMPLATES = (
    Template("grants", "deploy/roles", lambda: [grants()]),
    *map(_base, ("settings", "migrate", "workers", "analysis", "connectors", "extraction", "canary", "query")),
    *map(_base, ("autoscaling", "disruption", "network", "egress")),
    Template(
        "kafka-login",
        "deploy/kubernetes/overlays/production/kafka-auth.yaml",
        _of("overlays/production/kafka-auth.yaml"),
        "and .Values.keda.enabled .Values.keda.secret",
    ),
    Template(
        "kafka-rights",
        "deploy/kubernetes/components/kafka-rights and kafka-users",
        _of("components/kafka-rights/job.yaml", "components/kafka-rights/network.yaml"),
        ".Values.kafkaRights.enabled",
    ),
    Template(
        "alerting",
        "deploy/kubernetes/components/alerting",
        _of("components/alerting/alertmanager.yaml", "components/alerting/network.yaml"),
        ".Values.alerting.enabled",
    ),
    Template(
        "trail-verify",
        "deploy/kubernetes/components/trail-verify",
        _of("components/trail-verify/cronjob.yaml", "components/trail-verify/network.yaml"),
        ".Values.trailVerify.enabled",
    ),
    Template(
        "traces",
        "deploy/kubernetes/components/traces",
        _of("components/traces/network.yaml"),
        ".Values.traces.enabled",
    ),
    Template(
        "cilium-names",
        "deploy/kubernetes/components/cilium-names",
        _of("components/cilium-names/names.yaml"),
        ".Values.ciliumNames.enabled",
    ),
)

SERVICE_ACCOUNT_ANNOTATIONS = """\
{{- with .Values.serviceAccount.annotations }}
annotations: {{- toYaml . | nindent INDENT }}
{{- end }}"""
PULL_SECRETS = """\
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}"""
HELPERS = """\
{{- define "penstock.image" -}}
{{ .Values.image.name }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}
"""


def render(template: Template) -> str:
    """The text of a template."""
    parts = [f"{{{{- /* Written by `python -m deploy.helm` from {template.origin}. */}}}}\n"]
    for o in template.objects():
        marks = Marks()
        condition = " ".join(filter(None, [template.condition, _mark(o, marks)]))
        text = f"---\n{marks.render(o)}"
        parts.append(f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n" if condition else text)
    return "".join(parts)


def _mark(o: Object, marks: Marks) -> str:
    """Mark what values may change in this object. Returns the condition for this object alone, or nothing."""
    if o["kind"] == "StatefulSet":
        _mark_alertmanager(o, marks)
    elif template_of(o) is not None:
        _mark_workload(o, marks)
    match o["kind"], o["metadata"]["name"]:
        case "ConfigMap", "penstock-settings":
            o["data"] = {
                marks.lines(
                    "{{- toYaml .Values.settings | nindent HERE }}\n"
                    "{{- if .Values.traces.enabled }}\n"
                    "OTEL_EXPORTER_OTLP_ENDPOINT: {{ .Values.traces.endpoint | quote }}\n"
                    "{{- end }}"
                ): None
            }
        case "ConfigMap", "penstock-extraction":
            o["data"] = marks.tree(".Values.extraction.settings")
        case "ConfigMap", "penstock-connectors":
            o["data"] = {"connectors.toml": marks.value(".Values.connectors.declared | toJson")}
        case "ConfigMap", "penstock-limits":
            o["data"] = {"limits.toml": marks.value(".Values.query.limits | toJson")}
        case "ServiceAccount", _:
            o["metadata"][marks.lines(SERVICE_ACCOUNT_ANNOTATIONS)] = None
            o[marks.lines(PULL_SECRETS)] = None
        case "PersistentVolumeClaim", "penstock-connectors":
            o["spec"]["resources"]["requests"]["storage"] = marks.value(".Values.connectors.storage")
            storage = "{{- with .Values.connectors.storageClass }}\nstorageClassName: {{ . | quote }}\n{{- end }}"
            o["spec"][marks.lines(storage)] = None
        case "HorizontalPodAutoscaler", "penstock-query":
            o["spec"]["minReplicas"] = marks.value(".Values.query.minReplicas")
            o["spec"]["maxReplicas"] = marks.value(".Values.query.maxReplicas")
        case "ScaledObject", name:
            _mark_scaler(o, _value(name), marks)
            return ".Values.keda.enabled"
        case "TriggerAuthentication", _:
            for parameter in o["spec"]["secretTargetRef"]:
                parameter["name"] = marks.value(".Values.keda.secret | quote")
        case "NetworkPolicy", name:
            _mark_policy(o, name, marks)
        case "CiliumNetworkPolicy", ("penstock-to-sources" | "penstock-to-models") as name:
            kind = name.removeprefix("penstock-to-")
            o["spec"]["egress"][0]["toFQDNs"] = marks.tree(f".Values.ciliumNames.{kind}")
        case "CiliumNetworkPolicy", _:
            [servers] = o["spec"]["egress"][0]["toEndpoints"]
            servers["matchLabels"]["k8s:io.kubernetes.pod.namespace"] = marks.value(".Values.namespaces.dns | quote")
    return ""


def _value(name: str) -> str:
    """The values of a process: ``trailVerify`` for ``penstock-trail-verify``."""
    first, *rest = name.removeprefix("penstock-").split("-")
    return f".Values.{first}{''.join(word.capitalize() for word in rest)}"


def _mark_workload(o: Object, marks: Marks) -> None:
    name = o["metadata"]["name"]
    values = _value(name)
    template = template_of(o)
    assert template is not None
    spec = template["spec"]
    for container in containers(spec):
        _mark_container(container, values, marks)
    for volume in spec["volumes"]:
        if "secret" in volume:
            secret = {"secrets": f"{values}.secret", "keys": f"{values}.keysSecret"}[volume["name"]]
            volume["secret"]["secretName"] = marks.value(f"{secret} | quote")
        elif volume["name"] == "grants":
            volume["configMap"]["name"] = grants()["metadata"]["name"]
    spec["volumes"].append(
        marks.lines(
            "{{- with .Values.certificateAuthority }}\n- name: ca\n  configMap:\n    name: {{ . | quote }}\n{{- end }}"
        )
    )
    _mark_place(spec, marks)
    if name == "penstock-kafka-rights":
        _mark_users(spec, marks)
    elif name == "penstock-trail-verify":
        o["spec"]["schedule"] = marks.value(f"{values}.schedule | quote")
    elif name == "penstock-extraction":
        o["spec"]["replicas"] = marks.value(f"{values}.replicas")
    elif name.removeprefix("penstock-") in WORKERS:
        replicas = f"{{{{- if not .Values.keda.enabled }}}}\nreplicas: {{{{ {values}.minReplicas }}}}\n{{{{- end }}}}"
        o["spec"][marks.lines(replicas)] = None


def _mark_container(container: Object, values: str, marks: Marks) -> None:
    is_ours = container["image"] == "penstock"
    container["image"] = marks.value(
        'include "penstock.image" . | quote' if is_ours else f"{values}.grantsImage | quote"
    )
    container["resources"] = marks.tree(f"{values}.{'resources' if is_ours else 'grantsResources'}")
    for variable in container.get("env", ()):
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            reference["name"] = marks.value(f"{values}.secret | quote")
    for source in container.get("envFrom", ()):
        if "secretRef" in source:
            source["secretRef"]["name"] = marks.value(f"{values}.sourcesSecret | quote")
    container["volumeMounts"].append(
        marks.lines(
            "{{- if .Values.certificateAuthority }}\n"
            "- name: ca\n  mountPath: /etc/penstock-ca\n  readOnly: true\n"
            "{{- end }}"
        )
    )


def _mark_alertmanager(o: Object, marks: Marks) -> None:
    spec = o["spec"]["template"]["spec"]
    ours, server = containers(spec)
    ours["image"] = marks.value('include "penstock.image" . | quote')
    ours["resources"] = marks.tree(".Values.alerting.resources")
    server["image"] = marks.value(".Values.alerting.image | quote")
    server["resources"] = marks.tree(".Values.alerting.alertmanagerResources")
    [secret] = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
    secret["secretName"] = marks.value(".Values.alerting.secret | quote")
    [claim] = o["spec"]["volumeClaimTemplates"]
    claim["spec"]["resources"]["requests"]["storage"] = marks.value(".Values.alerting.storage")
    _mark_place(spec, marks)


def _mark_place(spec: Object, marks: Marks) -> None:
    """Mark where a pod may run."""
    for key in ("nodeSelector", "tolerations"):
        lines = f"{{{{- with .Values.{key} }}}}\n{key}: {{{{- toYaml . | nindent INDENT }}}}\n{{{{- end }}}}"
        spec[marks.lines(lines)] = None


def _mark_users(spec: Object, marks: Marks) -> None:
    """Mark the places that the component kafka-users fills in the job of kafka-rights."""
    arguments, mount, volume = (change["value"] for change in read("components/kafka-users/passwords.yaml")[0])
    volume["secret"]["secretName"] = "SECRET"
    when = "{{- with .Values.kafkaRights.usersSecret }}\n"
    end = "{{- end }}"
    [container] = spec["containers"]
    container[marks.lines(f"{when}args:\n" + "".join(f"  - {a}\n" for a in arguments) + end)] = None
    container["volumeMounts"].append(marks.lines(when + dump([mount]) + end))
    spec["volumes"].append(marks.lines(when + dump([volume]).replace("SECRET", "{{ . | quote }}") + end))


def _mark_scaler(o: Object, values: str, marks: Marks) -> None:
    o["spec"]["minReplicaCount"] = marks.value(f"{values}.minReplicas")
    o["spec"]["maxReplicaCount"] = marks.value(f"{values}.maxReplicas")
    for trigger in o["spec"]["triggers"]:
        trigger["metadata"]["bootstrapServers"] = marks.value(".Values.settings.PENSTOCK_KAFKA_BOOTSTRAP | quote")
        login = "{{- if .Values.keda.secret }}\nauthenticationRef:\n  name: penstock-kafka\n{{- end }}"
        trigger[marks.lines(login)] = None


def _mark_policy(o: Object, name: str, marks: Marks) -> None:
    if name == "penstock-to-receivers":
        o["spec"]["egress"] = marks.tree(".Values.alerting.receivers")
    elif name.startswith("penstock-to-"):
        o["spec"]["egress"] = marks.tree(f".Values.egress.{name.removeprefix('penstock-to-')}")
    elif name == "penstock-traces":
        [rule] = o["spec"]["egress"]
        [collector] = rule["to"]
        collector["namespaceSelector"]["matchLabels"][LABEL] = marks.value(".Values.traces.namespace | quote")
        collector["podSelector"]["matchLabels"] = marks.tree(".Values.traces.podLabels")
        rule["ports"][0]["port"] = marks.value('.Values.traces.endpoint | splitList ":" | last')
    else:
        for peer in _peers(o):
            labels = peer.get("namespaceSelector", {}).get("matchLabels", {})
            if LABEL in labels:
                kind = {"kube-system": "dns"}.get(labels[LABEL], labels[LABEL])
                labels[LABEL] = marks.value(f".Values.namespaces.{kind} | quote")


def _peers(o: Object) -> Iterator[Object]:
    for direction, key in (("ingress", "from"), ("egress", "to")):
        for rule in o["spec"].get(direction, ()):
            yield from rule.get(key, ())
