"""Reference of the settings and of the options of connectors, from the classes that read them."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings
from sphinx.pycode import ModuleAnalyzer

from connectors import declared
from connectors.declared import BUILT_IN, Common, source_class, table_model
from connectors.extraction.settings import ExtractionSettings
from connectors.uploads.options import UploadsQuota
from deploy.alertmanager.settings import AlertingSettings
from docs.site.markdown import code, prose, table
from pipeline.runtime import settings as worker_settings
from query import settings as query_settings

EVERY = "every process"
QUERY = "the query service (`penstock serve`, `mcp`), and `search`, `ask`, `why` where no service runs"
PARTS: Mapping[type[BaseSettings], tuple[str, str]] = {
    worker_settings.Settings: ("General", f"{EVERY}, and the commands that need the stores"),
    worker_settings.KafkaSettings: (
        "Kafka",
        "every worker, commands that publish or show the lag, and the query service, which shows it to operators",
    ),
    worker_settings.PostgresSettings: ("Postgres", EVERY),
    worker_settings.ElasticsearchSettings: ("Elasticsearch", f"{EVERY} but the workers vectors and connectors"),
    worker_settings.EmbeddingSettings: (
        "Embeddings",
        f"the worker vectors, `penstock migrate` and `generation`, and {QUERY}",
    ),
    worker_settings.StreamSettings: ("Workers", "every worker"),
    worker_settings.ConnectorSettings: ("Connectors", "the worker connectors"),
    ExtractionSettings: ("Extraction", "the worker connectors, `penstock ingest`, and `penstock extract serve`"),
    UploadsQuota: ("Uploads", "the worker connectors"),
    worker_settings.WebhookSettings: ("Webhooks", "the worker connectors and `penstock webhook`"),
    worker_settings.ConversationSettings: ("Conversations", "the workers detect and vectors"),
    worker_settings.AuditSettings: ("Audit", "the workers detect and keywords"),
    worker_settings.RetentionSettings: ("Retention", "the worker detect, `penstock forget` and `penstock trail`"),
    worker_settings.CanarySettings: ("Canary", "the worker canary"),
    worker_settings.PortSettings: ("Ports", "every process that serves HTTP"),
    worker_settings.TrailSettings: ("Audit trail", "the query service, and the commands that show or change data"),
    query_settings.ServeSettings: ("Serving", "the query service"),
    query_settings.AuthSettings: ("Authentication", "the query service"),
    query_settings.RetrievalSettings: ("Search", QUERY),
    query_settings.RerankSettings: ("Reranking", QUERY),
    query_settings.ChatSettings: ("Answers", QUERY),
    query_settings.FeedbackSettings: ("Feedback", "the query service, `penstock forget`, `penstock export`"),
    query_settings.EvalSettings: ("Evaluation", "the query service, `penstock eval`"),
    query_settings.ShadowSettings: ("Shadow queries", "the query service"),
    query_settings.CandidateRanking: (
        "Candidate settings of search",
        "the query service and `penstock golden compare`",
    ),
    query_settings.CandidateReranker: (
        "Candidate settings of reranking",
        "the query service and `penstock golden compare`",
    ),
    AlertingSettings: ("Alerting", "Alertmanager's configuration (`python -m deploy.alertmanager`)"),
}
"""Settings class → its heading, and what reads it. ``QuerySettings`` only holds others."""


def document() -> str:
    parts: list[str] = []
    for part, (title, readers) in PARTS.items():
        prefix = str(part.model_config["env_prefix"])
        described = f" {prose(part.__doc__)}" if part.__doc__ and part is not worker_settings.Settings else ""
        rows = _rows(part, lambda name, prefix=prefix: f"{prefix}{name.upper()}")
        parts += [f"## {title}\n\n", f"Read by {readers}.{described}\n\n"]
        parts.append(table(("variable", "type", "default", "meaning"), rows))
    return "".join(parts)


def connector_options() -> str:
    parts = ["## Every connector\n\n", table(("key", "type", "default", "meaning"), _rows(Common, str))]
    for kind in BUILT_IN:
        options = source_class(kind).Options
        parts += [f"## {kind}\n\n"]
        if options.__doc__ and "kind" not in options.__doc__:
            parts.append(f"{prose(options.__doc__)}\n\n")
        parts.append(table(("key", "type", "default", "meaning"), _rows(options, str)))
        for name, inner in _tables_of(options):
            parts += [f"### {kind}: {name}\n\n", f"{prose(inner.__doc__ or '')}\n\n"]
            parts.append(table(("key", "type", "default", "meaning"), _rows(inner, str)))
    return "".join(parts).replace("JSON list", "list").replace("JSON object", "table")


def metadata_keys() -> str:
    """The keys of metadata that each built-in kind declares (``penstock metadata adopt``)."""

    def shown(name: str, of_type: str) -> str:
        return code(name) if of_type == "keyword" else f"{code(name)} ({of_type})"

    rows = [(code(kind), declared.metadata_keys(kind)) for kind in BUILT_IN]
    return table(
        ("kind", "keys"), [(kind, ", ".join(shown(*key) for key in keys.items())) for kind, keys in rows if keys]
    )


def _tables_of(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the options whose value is a table with keys of its own, or several such tables by name."""
    for name, field in model.model_fields.items():
        if (inner := table_model(field.annotation)) is not None:
            yield name, inner


def _rows(model: type[BaseModel], named: Any) -> Iterator[tuple[str, str, str, str]]:
    documented = _docstrings(model)
    for name, field in model.model_fields.items():
        if not (inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel)):
            meaning = " ".join(filter(None, [prose(documented.get(name, "")), _limits(field.metadata)]))
            yield code(named(name)), type_name(field.annotation), _default(field), meaning


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Field → the string below it, which Python itself does not keep."""
    strings: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, BaseModel) and kind.__module__.partition(".")[0] not in ("pydantic", "pydantic_settings"):
            attributes = ModuleAnalyzer.for_module(kind.__module__).find_attr_docs()
            strings |= {
                name: "\n".join(lines) for (owner, name), lines in attributes.items() if owner == kind.__qualname__
            }
    return strings


def type_name(annotation: Any) -> str:
    """A type in words, as somebody who sets a variable needs it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return ", ".join(code(str(value)) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(inner) for inner in arguments if inner is not types.NoneType))
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return "JSON object"
    if inspect.isclass(origin) and issubclass(origin, Collection):
        return f"JSON list of {type_name(arguments[0])}"
    plain = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path", SecretStr: "secret"}
    return plain.get(
        annotation, "JSON object" if inspect.isclass(annotation) and issubclass(annotation, BaseModel) else "text"
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None and not inspect.isclass(field.default_factory):
        return "computed"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value in (None, "", (), [], {}, frozenset(), PydanticUndefined):
        return ""
    return code(json.dumps(value, default=str) if isinstance(value, (bool, tuple, list, dict)) else str(value))


def _limits(metadata: Collection[Any]) -> str:
    words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    limits = [
        f"{word} {getattr(constraint, name):,g}"
        for constraint in metadata
        for name, word in words.items()
        if isinstance(getattr(constraint, name, None), (int, float))
    ]
    return f"{', '.join(limits).capitalize()}." if limits else ""
