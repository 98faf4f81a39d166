"""The query service's settings. Sources and errors as in ``pipeline.settings``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import SettingsConfigDict

from pipeline.settings import Part, explained


class RetrievalSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_QUERY_", frozen=True, extra="forbid")

    per_document: int = Field(2, ge=1)
    """Passages of one document among the first, as long as others have something to say."""
    cached_queries: int = Field(2_000, ge=0)
    """Embedded queries, and answers by access set, that are remembered; 0 remembers none."""
    standard_tokens: int = Field(30_000, ge=1)
    extended_tokens: int = Field(150_000, ge=1)
    """What documents may fill of a model's window, by the caller's class (cl100k)."""
    personal_sources: frozenset[str] = frozenset()
    """Sources that hold one person's own documents: searched by meaning and by time."""


class RerankSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_RERANK_", frozen=True, extra="forbid")

    url: str | None = None
    """Of a server that answers Cohere's rerank (Jina, TEI, vLLM, Cohere), with its path. None: no reranking by HTTP."""
    api_key: SecretStr | None = None
    model: str = ""
    onnx_path: Path | None = None
    """Folder of a cross-encoder (``model.onnx`` and ``tokenizer.json``), run in the service itself."""
    pool: int = Field(50, ge=2, le=200)
    """Passages that are reranked …"""
    top: int = Field(5, ge=1, le=20)
    """… and how many of them an answer is given, unless the caller asks for another number."""
    timeout_seconds: float = Field(1.0, gt=0)
    """A slower one is left out: the order of the fusion stays."""


class ChatSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CHAT_", frozen=True, extra="forbid")

    base_url: str | None = None
    """Of an OpenAI-compatible server, with ``/v1``. None and no api_key: `ask` returns cited passages and says so."""
    api_key: SecretStr | None = None
    model: str = ""
    window_tokens: int = Field(128_000, ge=2_048)
    answer_tokens: int = Field(1_024, ge=16)
    context_tokens: int = Field(6_000, ge=256)
    """What retrieved passages may fill (cl100k)."""
    first_token_seconds: float = Field(20.0, gt=0)
    timeout_seconds: float = Field(60.0, gt=0)
    """For the whole answer."""


class ServeSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SERVE_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    """0 finds a free one."""
    development: bool = False
    """Callers name themselves: on loopback only, and said loudly."""
    max_body_bytes: int = Field(1_000_000, ge=1_000)
    requests_per_minute: int = Field(120, ge=1)
    """Of one caller."""
    concurrent_per_caller: int = Field(8, ge=1)
    concurrent: int = Field(32, ge=1)
    """Requests that are worked on at once …"""
    waiting: int = Field(64, ge=0)
    """… and that wait for it; more are sent away with 503 and Retry-After."""
    search_seconds: float = Field(10.0, gt=0)


class AuthSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_AUTH_", frozen=True, extra="forbid")

    jwks_url: str | None = None
    issuer: str | None = None
    audience: str | None = None
    algorithms: tuple[Literal["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"], ...] = ("RS256",)
    tenant: str | None = None
    """Of everybody, where one service answers one tenant. None: the token's ``tenant_claim``."""
    tenant_claim: str = "tenant"
    principal_claim: str = "email"
    keys_file: Path | None = None
    """TOML of services' API keys, by name: ``sha256`` of the key, ``tenant``, ``tags`` or ``principal``, ``class``."""


class EvalSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_EVAL_", frozen=True, extra="forbid")

    every_seconds: float = Field(900.0, gt=0)
    ndcg_floor: float = Field(0.82, ge=0, le=1)
    faithfulness_floor: float = Field(0.90, ge=0, le=1)


class QuerySettings(Part):
    """All parts of the query service's own. Build one with ``load()``."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", frozen=True, extra="ignore")

    retrieval: RetrievalSettings = Field(default_factory=RetrievalSettings)
    rerank: RerankSettings = Field(default_factory=RerankSettings)
    chat: ChatSettings = Field(default_factory=ChatSettings)
    serve: ServeSettings = Field(default_factory=ServeSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    evaluation: EvalSettings = Field(default_factory=EvalSettings)


def load() -> QuerySettings:
    """Settings as they are now. Raises Misconfigured with one line that names the variable."""
    try:
        return QuerySettings()
    except ValidationError as error:
        raise explained(error) from error
