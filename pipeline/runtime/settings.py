"""Every setting, typed, in one place. Sources, first one wins: environment (``PENSTOCK_<PART>_<FIELD>``), then files of
those names in ``$PENSTOCK_SECRETS_DIR`` (for what shall stand in no environment), then the endpoints that a running
local stack wrote to ``$PENSTOCK_HOME/endpoints.json``, then the defaults here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import structlog
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from pipeline.core.errors import Misconfigured
from pipeline.core.model import EmbeddingProvider
from pipeline.runtime.credentials import SecretFilesSource, variable_names, whole_dsn
from pipeline.runtime.home import ENDPOINTS_FILE as ENDPOINTS_FILE
from pipeline.runtime.home import TRAIL_FILE, secret
from pipeline.runtime.home import home as home

log = structlog.get_logger()

SIMILAR = 0.9
"""How similar a variable's name is to that of a setting which was probably meant."""


def dist() -> Path:
    """Where unpacked servers and converted models are kept, shared by all state folders: ``$PENSTOCK_DIST``, default
    a folder in the virtual environment when that can be written, else in the state folder."""
    if chosen := os.environ.get("PENSTOCK_DIST"):
        return Path(chosen).absolute()
    prefix = Path(sys.prefix)
    if sys.prefix != sys.base_prefix and os.access(prefix, os.W_OK):
        return prefix / "penstock"
    return home() / "dist"


class _EndpointsSource(PydanticBaseSettingsSource):
    """Reads the part of ``endpoints.json`` that belongs to one settings class, e.g. ``{"kafka": {"bootstrap": …}}``."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        part = str(self.config.get("env_prefix", "")).removeprefix("PENSTOCK_").removesuffix("_").lower()
        try:
            written: Mapping[str, Any] = json.loads((home() / ENDPOINTS_FILE).read_text())
        except FileNotFoundError:
            return {}
        return dict(written.get(part, {}))


_PREFIXES: dict[str, str] = {}
"""The prefix of a part's variables, by the name of its class."""


class Part(BaseSettings):
    """One part: its variables begin with its ``env_prefix``. A package above may have parts of its own."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _PREFIXES[cls.__name__] = str(cls.model_config.get("env_prefix"))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, SecretFilesSource(settings_cls), _EndpointsSource(settings_cls)


class KafkaSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_KAFKA_", frozen=True, extra="forbid")

    bootstrap: str = "127.0.0.1:9092"
    """``host:port``, several separated by commas."""
    topic_prefix: str = ""
    """Put before every topic and consumer group, for a cluster shared with others."""
    replication: int = 1
    """How many brokers hold each partition of the topics that `penstock migrate` creates."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How connections are protected and authenticated."""
    sasl_mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"
    """How the password is proved, with SASL."""
    sasl_username: str | None = None
    """The login, which SASL requires."""
    sasl_password: SecretStr | None = None
    """The password of that login."""
    ssl_cafile: str | None = None
    """A file with the authorities (PEM) that signed the brokers' certificates. Default: those that this machine
    trusts."""
    ssl_certfile: str | None = None
    """Our client certificate (PEM), for brokers that require one."""
    ssl_keyfile: str | None = None
    """The key of our client certificate (PEM)."""
    ssl_key_password: SecretStr | None = None
    """The password of that key, if it is encrypted."""
    signing_key_file: str | None = None
    """An Ed25519 private key (PEM) with which this process signs what it publishes: `penstock producer add`."""

    @model_validator(mode="after")
    def _has_a_login(self) -> Self:
        if self.security_protocol.startswith("SASL") and (self.sasl_username is None or self.sasl_password is None):
            raise ValueError("SASL needs PENSTOCK_KAFKA_SASL_USERNAME and PENSTOCK_KAFKA_SASL_PASSWORD")
        return self


class PostgresSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_POSTGRES_", frozen=True, extra="forbid")

    dsn: SecretStr = SecretStr("postgresql://postgres@127.0.0.1:5432/penstock")
    """The address of the server and TLS options: ``…?sslmode=verify-full&sslrootcert=FILE``, with ``sslcert`` and
    ``sslkey`` for a client certificate."""
    username: str | None = None
    """The login, instead of the one in ``dsn``."""
    password: SecretStr | None = None
    """The password of that login, instead of the one in ``dsn``."""
    pool_max_size: int = 10
    """The most connections of one process."""
    statement_timeout_seconds: float = 60.0
    """A statement that takes longer is cancelled. A connection on which nothing arrives for half a minute longer is
    closed and replaced."""

    @model_validator(mode="after")
    def _with_login(self) -> Self:
        """Put the login into ``dsn``, so that no other code has to."""
        object.__setattr__(self, "dsn", whole_dsn(self.dsn, self.username, self.password))
        return self


class ElasticsearchSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_ELASTICSEARCH_", frozen=True, extra="forbid")

    url: str = "http://127.0.0.1:9200"
    """The address of the server, or those of several nodes of a cluster, separated by commas."""
    index_prefix: str = ""
    """Put before every index name, for a cluster shared with others."""
    username: str | None = None
    """The login, with ``password``, instead of ``api_key``."""
    password: SecretStr | None = None
    """The password of that login."""
    api_key: SecretStr | None = None
    """An encoded API key of Elasticsearch."""
    ca_certs: str | None = None
    """A file with the authorities (PEM) that signed the server's certificate. Default: those that this machine
    trusts."""
    client_cert: str | None = None
    """Our client certificate (PEM), for a server that requires one."""
    client_key: str | None = None
    """The key of our client certificate (PEM)."""
    request_timeout_seconds: float = 30.0
    """The time limit of a request."""
    shards: int = 1
    """The number of primary shards of an index that is created."""
    replicas: int = 0
    """The number of copies of each shard of an index that is created."""


OPENAI_URL = "https://api.openai.com/v1"
"""The address of a server of embeddings or chat whose ``base_url`` is not set."""


class EmbeddingSettings(Part):
    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_EMBEDDING_", frozen=True, extra="forbid", protected_namespaces=()
    )

    provider: EmbeddingProvider = "local"
    """local: MiniLM in the worker itself, offline. openai: any OpenAI-compatible server."""
    model: str = ""
    """Default: all-MiniLM-L6-v2 (local), text-embedding-3-large (openai)."""
    dimensions: int | None = None
    """Default: 384 (local), 1536 (openai)."""
    base_url: str | None = None
    """The address of an OpenAI-compatible server, with ``/v1``. Default: OpenAI's own."""
    api_key: SecretStr | None = None
    """The key of that server. Default: ``OPENAI_API_KEY``."""
    api_keys: dict[str, SecretStr] = Field(default_factory=dict)
    """Keys of other services, while generations of several models exist: JSON, ``{"host:port": "key"}`` (the port only
    where the address names it). Each is sent to its host alone."""
    input_window: int | None = None
    """Most tokens of one input. Default: 254 (local: 256 with its two special tokens), 8191 (openai)."""
    document_prefix: str = ""
    """Put before every passage that is embedded, for models that need it."""
    query_prefix: str = ""
    """Put before every query that is embedded, for models that need it."""
    send_dimensions: bool = True
    """Whether requests carry ``dimensions`` (only some models take it)."""
    encoding_format: Literal["float", "base64"] = "base64"
    """The form in which the server is asked to return vectors."""
    timeout_seconds: float = 30.0
    """The time limit of a request."""
    parallel_requests: int = 4
    """The most concurrent requests of one process."""
    batch_inputs: int = 512
    """The most texts in a request."""
    batch_tokens: int = 250_000
    """The most tokens in a request."""
    price_per_million_tokens: float = Field(0.0, ge=0)
    """The provider's price, in any currency, from which ``penstock_embedding_cost_total`` is computed."""
    daily_budget: float = Field(0.0, ge=0)
    """More than that in a day raises the alert on spending; 0: none."""
    threads: int | None = None
    """Threads of the local model. Default: one for each processor that this process may use."""
    chunk_tokens: int | None = None
    """Target size of a chunk. Default: 400, or what the model's window allows."""


class StreamSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_STREAM_", frozen=True, extra="forbid")

    lanes: int = 8
    """Batches that a worker process handles at the same time in each stage, of live changes and of backfill. Changes of
    one document are handled one after another."""
    batch_size: int = 32
    """Most records that a lane works on at once; keywords twice as many (BATCH_FACTOR)."""
    batch_wait_seconds: float = 0.25
    """Average time between two batches of a stage that are not full: a steady stream is handled together. What comes
    after a pause does not wait."""
    lane_queue: int = 64
    """Records that wait for each lane, of live changes and of backfill, before their topic is held back."""
    backfill_share: float = 0.1
    """The share of its time in which a worker does backfill while live records wait too long, so that neither
    starves."""
    dead_letters_per_minute: int = 60
    """Where no other source gets through (a bad deploy), bad records beyond so many a minute and stage wait instead of
    becoming dead letters. 0: they always do."""
    live_documents_per_second: float = Field(200.0, ge=0)
    """The live documents of one source that a detect worker handles, with ten seconds' worth at once, and five times as
    many of all sources of one tenant or producer. A large document counts as one for each 4 KiB or 64 lines, and HTML
    as one for each KiB or 32 tags and lines, because they take as long. Live documents beyond that wait with the
    backfill, so that they delay nobody else. Deletes and access changes never wait. 0: no limit."""
    session_timeout_seconds: float = 45.0
    """How long Kafka waits for a silent worker before its partitions go to another one."""
    sweep_interval_seconds: float = 1.0
    """Between two looks of the sweeper for work that is pending too long."""
    sweep_after_seconds: float = 30.0
    """How long live work may stay pending before the sweeper hints again (backfill: ten times as long)."""
    vitals_seconds: float = Field(15.0, gt=0)
    """Between two measurements of the backlog and the lag of the stages: about one a scrape."""
    health_port: int = 0
    """Port of /livez, /readyz, /status and /metrics on health_host; 0 finds a free one."""
    health_host: str = "127.0.0.1"
    """The address on which a worker listens for health checks and Prometheus."""


def _network(value: str) -> str:
    if not ip_network(value).prefixlen:
        raise ValueError("every client would be a proxy, which has no limit of its own: name the proxies' addresses")
    return value


class PortSettings(Part):
    """Limits of a client on any HTTP port before it is authenticated (``pipeline.runtime.http_server``)."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_PORTS_", frozen=True, extra="forbid")

    connections: int = Field(512, ge=1)
    """Connections of all clients of one port at once. More are answered 503, health checks excepted."""
    connections_per_address: int = Field(128, ge=1)
    """Connections of one address (of IPv6: one /64 network), and requests of one client of a trusted proxy, at once."""
    trusted_proxies: tuple[Annotated[str, AfterValidator(_network)], ...] = ()
    """Addresses or networks of proxies whose ``X-Forwarded-For`` names the client. The limit of an address does not
    apply to them."""
    head_seconds: float = Field(10.0, gt=0)
    """How long a request's head may take to arrive."""
    body_seconds: float = Field(10.0, gt=0)
    """How long a body may take to arrive, or a response to be read, in addition to a second for each
    ``bytes_per_second`` of it."""
    bytes_per_second: int = Field(4_096, ge=1)
    """Clients that send or read more slowly are cut off."""


def _repair(value: object) -> object:
    """Accept the two values that were possible before there was a third choice."""
    return {"true": "all", "1": "all", "false": "none", "0": "none"}.get(str(value).lower(), value)


class AuditSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_AUDIT_", frozen=True, extra="forbid")

    documents_per_second: float = Field(300.0, ge=0)
    """Most that the continuous audit in the workers reads, over all of them: a million documents in an hour. It reads
    less where that would take more than a quarter of a processor; 0 turns it off."""
    repair: Annotated[Literal["none", "without_embedding", "all"], BeforeValidator(_repair)] = "without_embedding"
    """The differences that the continuous audit repairs. none: it only reports; ``false`` means the same, and ``true``
    means all."""


class ConversationSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CONVERSATIONS_", frozen=True, extra="forbid")

    gate_tokens: int = Field(200_000, ge=1)
    """A member's history of fewer tokens (cl100k) is served whole; from there on, for good, by its nearest chunks."""
    embeddings_per_second: float = Field(50.0, gt=0)
    """Pace of embedding chunks in each vectors worker, which does it when documents leave it time."""


class ConnectorSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CONNECTORS_", frozen=True, extra="forbid")

    http_host: str = "127.0.0.1"
    """The address on which the worker listens for events, uploads and conversations."""
    http_port: int = Field(0, ge=0, le=65535)
    """The port for events, uploads and conversations; 0 finds a free one (`penstock connector status` shows it)."""
    events_url: str | None = None
    """``https://host`` under which sources reach that port from outside. Without it they are polled."""


class CanarySettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CANARY_", frozen=True, extra="forbid")

    every_seconds: float = Field(60.0, ge=0, le=120)
    """Between two rounds of a source's canary; 0: none, and a worker ``canary`` removes those that are left. Not more
    than 120: one that was not found for six minutes is late (the alert ``PenstockCanaryLate``)."""
    patience_seconds: float = Field(300.0, gt=0)
    """How long a round looks for it before it counts as late: the promise for a change."""
    withdrawal_seconds: float = Field(30.0, gt=0)
    """How long a revoked or deleted one may still be found before that counts as a failure."""
    sources: tuple[str, ...] = ()
    """``tenant/source`` of each. Empty: those of every connector; where there are none, one that stands for the
    pipeline."""


def _beyond_replays(days: float) -> float:
    if 0 < days <= DEAD_LETTER_DAYS:
        raise ValueError(f"has to be 0 or more than {DEAD_LETTER_DAYS}: so long a dead letter may be replayed")
    return days


Days = Annotated[float, Field(ge=0, le=36_500)]
"""0: for ever."""
KEY_CHARACTERS = 32
"""The least length of a key that our own signatures are made with."""
TRAIL_DAYS = 30
"""The audit trail is retained for at least so long, whatever the settings say (migration 0039)."""
DEAD_LETTER_DAYS = 90
"""As long as Kafka keeps dead letters (topics.registry; a test compares them)."""


def _not_fewer(days: float) -> float:
    if 0 < days < TRAIL_DAYS:
        raise ValueError(f"has to be 0 or at least {TRAIL_DAYS}: a login that may expire it can take no more")
    return days


class RetentionSettings(Part):
    """How many days possibly personal data is retained; 0: for ever. docs/retention.md explains each setting."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_RETENTION_", frozen=True, extra="forbid")

    deleted_days: Days = 30.0
    """Title, author, address and external id of a document after its deletion at the source, and golden questions that
    were promoted from what it said; its text goes at once."""
    superseded_days: Days = 30.0
    """Texts that lost by version, kept in case a delete between them and the winner still arrives."""
    memberships_days: Annotated[Days, AfterValidator(_beyond_replays)] = 120.0
    """Names of people who hold no groups any more."""
    dead_letters_days: Days = 90.0
    """The list of dead letters. Kafka's copy goes by its topic's retention."""
    reviews_days: Days = 30.0
    """Answers that wait for a review, and what reviewers decided."""
    feedback_days: Days = 30.0
    """Feedback about answers and passages."""
    standing_days: Days = 365.0
    """Standing questions, from when they were last asked."""
    budgets_days: Days = 30.0
    """Names of callers beside what they last used of their day's budget of requests."""
    golden_days: Days = 0.0
    """Golden questions, from when they were added."""
    trail_days: Annotated[Days, AfterValidator(_not_fewer)] = 400.0
    """The audit trail, whole days of it: nobody erases single records."""
    backups_days: Days = 35.0
    """How long backups are kept: nothing here makes or removes any; receipts of `penstock forget` name it."""


Producers = Literal["off", "warn", "enforce"]
"""off: nobody looks at signatures. warn: what would be refused is counted and accepted. enforce: it is refused."""


Trail = Literal["off", "on", "required"]
"""on: records are written within a second. required: nothing is shown before its record is committed."""


def _local_trail_key() -> SecretStr | None:
    try:
        return SecretStr(secret(home() / TRAIL_FILE))
    except FileNotFoundError:
        return None


class TrailSettings(Part):
    """The keys of the audit trail (docs/trail.md)."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_TRAIL_", frozen=True, extra="forbid")

    key: Annotated[SecretStr | None, BeforeValidator(lambda value: value or None)] = Field(
        default_factory=_local_trail_key
    )
    """The key that chains its records, at least 32 characters. Default: the one in ``trail-key`` in PENSTOCK_HOME,
    which `penstock up` creates for a new local stack. Without one, anybody who may write its tables can forge a
    chain."""
    previous_keys: tuple[SecretStr, ...] = ()
    """The keys that chained older records, for `penstock trail verify`: JSON, ``["KEY"]``; ``""`` stands for records
    that were chained without a key."""

    @model_validator(mode="after")
    def _is_long(self) -> Self:
        if self.key is not None and len(self.key.get_secret_value()) < KEY_CHARACTERS:
            raise ValueError(f"KEY is too short: give at least {KEY_CHARACTERS} random characters")
        return self


class WebhookSettings(Part):
    """Webhooks to other systems (docs/events.md)."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_WEBHOOKS_", frozen=True, extra="forbid")

    key: Annotated[SecretStr | None, BeforeValidator(lambda value: value or None)] = None
    """The key from which the secret of each endpoint is derived, at least 32 characters. The connectors worker and
    `penstock webhook` need the same one. Without it nothing is sent."""
    give_up_seconds: float = Field(86_400.0, gt=0)
    """An event that fails for so long while others of its endpoint succeed is parked; an endpoint that fails for so
    long is paused."""
    keep_seconds: float = Field(1_209_600.0, gt=0)
    """An event that its endpoint has not taken for so long is deleted: as long as Kafka keeps it."""

    @model_validator(mode="after")
    def _is_long(self) -> Self:
        if self.key is not None and len(self.key.get_secret_value()) < KEY_CHARACTERS:
            raise ValueError(f"KEY is too short: give at least {KEY_CHARACTERS} random characters")
        return self


class Settings(Part):
    """All parts. Build one with ``load()``."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", frozen=True, extra="ignore")

    kafka: KafkaSettings
    postgres: PostgresSettings
    elasticsearch: ElasticsearchSettings
    embedding: EmbeddingSettings
    stream: StreamSettings
    audit: AuditSettings = Field(default_factory=AuditSettings)
    conversations: ConversationSettings = Field(default_factory=ConversationSettings)
    connectors: ConnectorSettings = Field(default_factory=ConnectorSettings)
    canary: CanarySettings = Field(default_factory=CanarySettings)
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    ports: PortSettings = Field(default_factory=PortSettings)
    producers: Producers = "off"
    """The treatment of records that no enrolled producer has signed for its own tenant and source."""
    trail: Trail = "on"
    """The record of who searched, read, was shown, changed or inspected what (docs/trail.md)."""
    trail_keys: TrailSettings = Field(default_factory=TrailSettings)
    webhooks: WebhookSettings = Field(default_factory=WebhookSettings)


def load() -> Settings:
    """Settings as they are now. A variable that is probably misspelt is logged. Raises Misconfigured with one line that
    names the variable."""
    try:
        settings = Settings(
            kafka=KafkaSettings(),
            postgres=PostgresSettings(),
            elasticsearch=ElasticsearchSettings(),
            embedding=EmbeddingSettings(),
            stream=StreamSettings(),
            audit=AuditSettings(),
            conversations=ConversationSettings(),
            connectors=ConnectorSettings(),
            canary=CanarySettings(),
            retention=RetentionSettings(),
            ports=PortSettings(),
            trail_keys=TrailSettings(),
            webhooks=WebhookSettings(),
        )
    except ValidationError as error:
        raise explained(error) from error
    except SettingsError as error:  # names field and source, never the value
        raise Misconfigured(f"{error}: it has to be JSON") from None
    new = variable_names() - _EXAMINED
    _EXAMINED.update(new)
    for name, meant in misspelt(new).items():
        log.warning("setting_unknown", name=name, says=f"it has no effect: is {meant} meant?")
    return settings


_EXAMINED: set[str] = set()
"""Names of variables that this process has examined: comparing one with all settings takes milliseconds."""


def misspelt(variables: Iterable[str]) -> dict[str, str]:
    """The variables that nothing reads and that resemble a setting, each with that setting. Without them a protection
    that somebody meant to enable is off. Others may be a connector's own."""
    known = {f"{_PREFIXES[part.__name__]}{name}".upper() for part in _parts(Part) for name in _fields(part)}
    unknown = sorted({name for name in variables if name.startswith("PENSTOCK_")} - known)
    closest = {name: get_close_matches(name, known, 1, SIMILAR) for name in unknown}
    return {name: matches[0] for name, matches in closest.items() if matches}


def _parts(of: type[Part]) -> Iterator[type[Part]]:
    for part in of.__subclasses__():
        yield part
        yield from _parts(part)


def _fields(part: type[Part]) -> Iterator[str]:
    """The fields that are variables, and not parts themselves."""
    for name, field in part.model_fields.items():
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Part)):
            yield name


def explained(error: ValidationError) -> Misconfigured:
    """One line that names the variable, and never its value."""
    problem = error.errors(include_input=False, include_url=False)[0]
    field = "_".join(str(part) for part in problem["loc"]).upper()
    prefix = _PREFIXES.get(error.title, "PENSTOCK_")
    return Misconfigured(f"setting {prefix}{field or '*'}: {problem['msg'].removeprefix('Value error, ')}")


@cache
def loaded() -> Settings:
    """``load()``, once a process."""
    return load()
