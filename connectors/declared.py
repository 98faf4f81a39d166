"""The connectors that one TOML file declares; their secrets come from the environment, or from secret files.

[connector.wiki]
kind = "confluence"          # or a kind that an installed package offers, or "package.module:Class"
tenant = "acme"
base_url = "https://acme.atlassian.net/wiki"
# token: PENSTOCK_WIKI_TOKEN in the environment, or token = { env = "ANOTHER_VARIABLE" }

[key.intranet]               # a caller of the connectors' HTTP server
sha256 = "…"                 # of the key, in hexadecimal
expires = 2027-06-01         # from then on the key is refused; at most 400 days ahead
tenant = "acme"
may = ["uploads", "conversations"]
"""

from __future__ import annotations

import importlib
import os
import re
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError

from connectors.faults import NotImported, place
from connectors.runner.plan import GROUPS_SECONDS, POLL_SECONDS, SWEEP_SECONDS, Plan
from connectors.source import Context, MetadataKeys, Source
from pipeline.core.canary import is_canary
from pipeline.core.errors import Misconfigured
from pipeline.core.identity import INGESTED
from pipeline.core.metadata_keys import KEY_TYPES, NAME
from pipeline.runtime import plugins
from pipeline.runtime.credentials import KeyExpiry
from pipeline.runtime.credentials import environment as settings_environment
from pipeline.runtime.home import of_current_folder
from topics.messages import Segment

PLUGINS: plugins.Group = "penstock.sources"
BUILT_IN = {
    "airbyte": "connectors.airbyte.source:Airbyte",
    "database": "connectors.database.source:Database",
    "folder": "connectors.folder.source:Folder",
    "confluence": "connectors.confluence.source:Confluence",
    "google-drive": "connectors.google_drive.source:GoogleDrive",
    "sharepoint": "connectors.sharepoint.source:SharePoint",
    "slack": "connectors.slack.source:Slack",
    "uploads": "connectors.uploads.source:Uploads",
    "git": "connectors.git.source:Git",
    "github": "connectors.github.source:GitHub",
    "jira": "connectors.jira.source:Jira",
    "objects": "connectors.objects.source:Objects",
    "web": "connectors.website.source:Website",
}
SWEEP_SECONDS_BY_KIND = {
    "confluence": 150.0,
    "database": 240.0,
    "git": 240.0,
    "google-drive": 240.0,
    "jira": 150.0,
    "sharepoint": 240.0,
}
"""The intervals of sweeps of kinds in which polls do not find what was deleted, moved or restricted. Elsewhere polls
do, or sweeps would use up what the vendor permits (GitHub, Slack)."""


def source_class(kind: str) -> type[Source]:
    """Return the class of a built-in kind, of a kind that an installed distribution offers, or of
    ``package.module:Class``. Raises Misconfigured with one line."""
    path = BUILT_IN.get(kind, kind)
    module, colon, name = path.partition(":")
    if not colon and kind in plugins.offered(PLUGINS):
        source = plugins.load(PLUGINS, kind)
    elif not colon or not module or not name:
        known = ", ".join(sorted({*BUILT_IN, *plugins.offered(PLUGINS)}))
        raise Misconfigured(f"kind {kind!r}: one of {known}, or package.module:Class of your own")
    else:
        try:
            source = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise Misconfigured(
                f"kind {kind!r}: {module} cannot be imported ({error}): install its package, or name the folder that"
                " holds it in PYTHONPATH"
            ) from error
        except Exception as error:  # a source is foreign code
            reason = f" ({error.msg})" if isinstance(error, SyntaxError) else ""
            raise NotImported(f"kind {kind!r}: {module} cannot be imported: {place(error)}{reason}") from error
    if not isinstance(source, type) or not hasattr(source, "Options") or not hasattr(source, "slim"):
        where = f"{module} has no class {name}" if colon else "its entry point is no class"
        raise Misconfigured(f"kind {kind!r}: {where} that implements a source (penstock.source.Source)")
    return cast("type[Source]", source)


def metadata_keys(kind: str) -> MetadataKeys:
    """Return the keys of metadata that the documents of a kind have and people filter by, with their types. Raises
    Misconfigured."""
    keys = getattr(source_class(kind), "metadata_keys", {})
    for name, of_type in keys.items():
        if not NAME.fullmatch(name) or of_type not in KEY_TYPES:
            raise Misconfigured(f"kind {kind!r}: its key {name!r} cannot be declared as {of_type!r}")
    return cast("MetadataKeys", keys)


VARIABLE = "PENSTOCK_CONNECTORS_FILE"
DEFAULT = "connectors.toml"
RESERVED = {INGESTED: "`penstock ingest` and `penstock watch` publish under this name"}

Api = Literal["uploads", "conversations"]
"""An HTTP API that a key may permit."""
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Common(BaseModel):
    """The keys that every connector's table may have in addition to its kind's own options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    kind: str
    """A built-in kind, a kind that an installed package offers, or ``package.module:Class``."""
    tenant: Segment = "default"
    """The tenant that owns the documents."""
    poll_seconds: Seconds = POLL_SECONDS
    """The interval at which the source is polled for changes."""
    sweep_seconds: Seconds | None = None
    """The interval of sweeps, which list everything and find what no event and no poll reported. None: that of the
    kind (SWEEP_SECONDS_BY_KIND, otherwise 600)."""
    groups_seconds: Seconds = GROUPS_SECONDS
    """The interval at which all memberships are read. A reading that takes more than half of it is followed by
    a pause of half of it."""


class Key(BaseModel):
    """A caller's bearer key, of which only the hash is stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    expires: KeyExpiry
    tenant: Segment
    may: frozenset[Api]


@dataclass(frozen=True, slots=True)
class Declared:
    """The contents of the file. ``Plan.make`` checks a plan against its kind."""

    file: Path
    plans: Mapping[str, Plan]
    keys: Mapping[str, Key]

    def plan(self, name: str) -> Plan:
        """Return the plan of a connector. Raises Misconfigured if it is not declared."""
        if name not in self.plans and name == "conversations":
            raise Misconfigured(
                "conversations are not crawled: a service whose [key.NAME] may use them posts them to"
                " /v1/conversations (docs/connectors/conversations.md)"
            )
        if name not in self.plans:
            known = ", ".join(self.plans) or "it declares none"
            raise Misconfigured(f"{self.file} declares no connector {name!r} (known: {known})")
        return self.plans[name]


def file_of(file: Path | None = None) -> Path:
    """Return the file of the declarations: ``file``, else ``PENSTOCK_CONNECTORS_FILE``, else the one in the current
    folder. Raises Misconfigured if that one belongs to another user: it says which code runs, and who may read what."""
    if chosen := file or os.environ.get(VARIABLE):
        return Path(chosen)
    return of_current_folder(DEFAULT, variable=VARIABLE)


def declared_or_none(*, needed: bool) -> Declared:
    """The declarations, or none where there is no file and none is needed: a worker may only send webhooks. Raises
    Misconfigured."""
    if needed or VARIABLE in os.environ or file_of().is_file():
        return load()
    return Declared(file_of(), {}, {})


def load(file: Path | None = None, environ: Mapping[str, str] | None = None) -> Declared:
    """Read the declarations. Raises Misconfigured with one line that names file, table and key."""
    path = file_of(file)
    environment = settings_environment() if environ is None else environ
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise Misconfigured(
            f"{path}: the file does not exist; declare connectors in it, or name another file with --file or {VARIABLE}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"{path}: cannot be read ({type(error).__name__})") from error
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"at line \d+, column \d+|at end of document", str(error))
        raise Misconfigured(f"{path}: is not valid TOML {where[0] if where else ''}".rstrip()) from error
    if unknown := sorted(set(raw) - {"connector", "key"}):
        raise Misconfigured(f"{path}: unknown table [{unknown[0]}] (known: [connector.NAME], [key.NAME])")
    plans = {name: _plan(path, name, table, environment) for name, table in _tables(path, raw, "connector").items()}
    prefixes: dict[str, str] = {}
    for name in plans:
        other = prefixes.setdefault(_prefix(name), name)
        if other != name:
            raise Misconfigured(f"{path}: [connector.{other}] and [connector.{name}] would share {_prefix(name)}…")
    return Declared(path, plans, {name: _key(path, name, table) for name, table in _tables(path, raw, "key").items()})


def options(
    kind: type[Source], table: Mapping[str, Any], name: str, environ: Mapping[str, str], where: str = ""
) -> BaseModel:
    """Return a kind's options with its secrets. Raises Misconfigured with one line: table, key and problem."""
    where = where or f"[connector.{name}]"
    values = _with_secrets(kind.Options, table, _prefix(name), environ, where)
    try:
        return kind.Options.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"]) or "options"
        field = kind.Options.model_fields.get(str(problem["loc"][0])) if problem["loc"] else None
        if problem["type"] == "missing" and field is not None and _is_secret(field.annotation):
            raise Misconfigured(f"{where} {key}: set {_prefix(name)}{key.upper()} in the environment") from error
        if problem["type"] == "extra_forbidden":
            known = ", ".join(kind.Options.model_fields)
            raise Misconfigured(f"{where} {key}: no such option (known: {known})") from error
        raise Misconfigured(f"{where} {key}: {problem['msg']}") from error


def _plan(path: Path, name: str, table: Mapping[str, Any], environ: Mapping[str, str]) -> Plan:
    where = f"{path}: [connector.{name}]"
    if not 0 < len(name) <= 200 or "/" in name or not name.isprintable():
        raise Misconfigured(f"{where}: a name has 1 to 200 characters, none of them a /")
    if name in RESERVED:
        raise Misconfigured(f"{where}: choose another name ({RESERVED[name]})")
    if is_canary(name):
        raise Misconfigured(f"{where}: choose another name (names that begin so belong to canaries)")
    try:
        common = Common.model_validate(table)
    except ValidationError as error:
        raise Misconfigured(f"{where} {_first(error)}") from error

    def make(context: Context) -> Source:
        kind = source_class(common.kind)
        return kind(options(kind, common.model_extra or {}, name, environ, where), context)

    return Plan(
        name=name,
        tenant=common.tenant,
        kind=common.kind,
        make=make,
        poll_seconds=common.poll_seconds,
        sweep_seconds=common.sweep_seconds or SWEEP_SECONDS_BY_KIND.get(common.kind, SWEEP_SECONDS),
        groups_seconds=common.groups_seconds,
    )


def _key(path: Path, name: str, table: Mapping[str, Any]) -> Key:
    try:
        return Key.model_validate(table)
    except ValidationError as error:
        raise Misconfigured(f"{path}: [key.{name}] {_first(error)}") from error


def _with_secrets(
    model: type[BaseModel], table: Mapping[str, Any], prefix: str, environ: Mapping[str, str], where: str
) -> dict[str, Any]:
    """Return the table with ``{ env = "VAR" }`` resolved, and with missing secrets from the environment."""
    values = dict(table)
    for name, field in model.model_fields.items():
        secret, value, variable = _is_secret(field.annotation), values.get(name), f"{prefix}{name.upper()}"
        if isinstance(value, Mapping) and set(value) == {"env"}:
            variable = str(value["env"])
            if variable not in environ:
                raise Misconfigured(f"{where} {name}: the environment has no variable {variable}")
            values[name] = environ[variable]
        elif secret and value is not None:
            raise Misconfigured(
                f'{where} {name}: a secret does not belong in a file: set {variable}, or say {{ env = "VARIABLE" }}'
            )
        elif secret and variable in environ:
            values[name] = environ[variable]
        elif isinstance(value, Mapping) and (inner := table_model(field.annotation)) is not None:
            values[name] = _with_secrets(inner, value, f"{variable}_", environ, f"{where} {name}:")
    return values


def table_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field whose value is a table, or None."""
    candidates = [annotation, *typing.get_args(annotation)]
    return next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _is_secret(annotation: Any) -> bool:
    return annotation is SecretStr or any(_is_secret(argument) for argument in typing.get_args(annotation))


def _prefix(name: str) -> str:
    return f"PENSTOCK_{re.sub(r'[^A-Z0-9]', '_', name.upper())}_"


def _tables(path: Path, raw: Mapping[str, Any], what: str) -> dict[str, Mapping[str, Any]]:
    tables = raw.get(what, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise Misconfigured(f"{path}: {what}: write one table [{what}.NAME] for each")
    return tables


def _first(error: ValidationError) -> str:
    problem = error.errors(include_input=False, include_url=False)[0]
    key = ".".join(str(part) for part in problem["loc"])
    return f"{key}: {'no such key' if problem['type'] == 'extra_forbidden' else problem['msg']}"
