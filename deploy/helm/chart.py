"""Every file of the Helm chart (deploy/chart) that is written from the manifests."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Iterator

from pydantic import BaseModel

from deploy.helm.marks import dump
from deploy.helm.source import DEPLOY
from deploy.helm.templates import HELPERS, TEMPLATES, render
from deploy.helm.values import Values, defaults

WIDTH = 120

NOTES = """\
Penstock {{ .Chart.AppVersion }} in the namespace {{ .Release.Namespace }}.
{{- range $kind, $rules := .Values.egress }}
{{- if not $rules }}
egress.{{ $kind }} is empty: {{ $kind }} cannot be reached.
{{- end }}
{{- end }}
Until the migration has finished, workers exit and log why:
  kubectl --namespace {{ .Release.Namespace }} logs job/penstock-migrate --all-containers --follow
Then enrol the two publishers: docs/deploy.md, "Kubernetes", step 6.
"""


def files() -> dict[str, str]:
    """Path in the chart → content."""
    return {
        "Chart.yaml": dump(metadata()),
        "values.yaml": _comment("Written by `python -m deploy.helm` from deploy/kubernetes and deploy/helm/values.py.")
        + "".join(_documented(defaults(), 0)),
        "values.schema.json": json.dumps(schema(), indent=2, ensure_ascii=False) + "\n",
        "templates/_helpers.tpl": HELPERS,
        "templates/NOTES.txt": NOTES,
        **{f"templates/{template.name}.yaml": render(template) for template in TEMPLATES},
    }


def metadata() -> dict[str, object]:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    return {
        "apiVersion": "v2",
        "name": project["name"],
        "description": project["description"],
        "type": "application",
        "version": project["version"],
        "appVersion": project["version"],
        "kubeVersion": ">=1.31.0-0",
    }


def schema() -> dict[str, object]:
    """The JSON Schema of the values: an unknown key of ours is rejected at every level."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Values.model_json_schema(by_alias=True)}


def _documented(part: BaseModel, depth: int) -> Iterator[str]:
    """A part of the values as YAML, each key below its description."""
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if value is None:
            continue
        key = field.alias or name
        about = field.description or (type(value).__doc__ if depth == 0 and _has_own_text(value) else None)
        indent = "  " * depth
        text = "" if depth else "\n"
        if about:
            text += textwrap.indent(_comment(about), indent)
        if isinstance(value, BaseModel):
            inner = list(_documented(value, depth + 1))
            yield text + (f"{indent}{key}:\n" + "".join(inner) if inner else f"{indent}{key}: {{}}\n")
        else:
            yield text + textwrap.indent(dump({key: value}), indent)


def _has_own_text(value: object) -> bool:
    return isinstance(value, BaseModel) and "__doc__" in vars(type(value)) and type(value).__doc__ is not None


def _comment(text: str) -> str:
    lines = textwrap.wrap(" ".join(text.split()), WIDTH - 8)
    return "".join(f"# {line}\n" for line in lines)
