"""The query service's settings. Sources and errors as in ``pipeline.runtime.settings``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import SettingsConfigDict

from pipeline.runtime.home import FEEDBACK_FILE, SHORTEST_SECRET, home, made_secret, secret
from pipeline.runtime.settings import Part, explained


class RetrievalSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_QUERY_", frozen=True, extra="forbid")

    per_document: int = Field(2, ge=1)
    """Passages of one document among the first, as long as others have something to say."""
    feedback: bool = True
    """Whether a hybrid search looks a second time, with what it found (query/retrieval/feedback.py): better, for nearly
    half as much time again."""
    feedback_at_once: int = Field(4, ge=0)
    """Of so many searches at once each looks a second time; as soon as more are under way, one look has to do. 0: none
    does."""
    cached_queries: int = Field(2_000, ge=0)
    """Embedded queries, and answers by access set, that are remembered; 0 remembers none."""
    standard_tokens: int = Field(30_000, ge=1)
    extended_tokens: int = Field(150_000, ge=1)
    """What documents may fill of a model's window, by the caller's class (cl100k)."""
    personal_sources: frozenset[str] = frozenset()
    """Sources that hold one person's own documents: searched by meaning and by time."""


Flavour = Literal["cohere", "jina", "tei", "vllm"]


class RerankSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_RERANK_", frozen=True, extra="forbid")

    url: str | None = None
    """Of a server that answers Cohere's rerank (Jina, TEI, vLLM, Cohere), with its path. None: no reranking by HTTP."""
    flavour: Flavour = "cohere"
    """How it is asked; whatever it answers is understood."""
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
    price_per_thousand_searches: float = Field(0.0, ge=0)
    """What the provider charges, in any currency: makes ``penstock_query_rerank_cost_total`` say money."""
    cached_pairs: int = Field(100_000, ge=0)
    """Scores that are remembered, by question and passage (about 200 bytes each); 0 remembers none."""


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
    temperature: float | None = Field(None, ge=0, le=2)
    """None: the model's own (some refuse any other)."""
    price_per_million_prompt_tokens: float = Field(0.0, ge=0)
    price_per_million_answer_tokens: float = Field(0.0, ge=0)
    """What the provider charges, in any currency: makes ``penstock_query_answer_cost_total`` say money."""
    first_token_seconds: float = Field(20.0, gt=0)
    timeout_seconds: float = Field(60.0, gt=0)
    """For the whole answer."""

    def money(self, *, prompt: int, answer: int) -> float:
        """Of so many tokens."""
        of_prompt = prompt * self.price_per_million_prompt_tokens
        return (of_prompt + answer * self.price_per_million_answer_tokens) / 1_000_000


class ServeSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SERVE_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    """0 finds a free one."""
    development: bool = False
    """Whoever shows the token of ``development_token_file`` names itself: on loopback only, and said loudly."""
    development_token_file: Path | None = None
    """Made at start, for this user alone, and read at each request. None: ``development-token`` in PENSTOCK_HOME."""
    max_body_bytes: int = Field(1_000_000, ge=1_000)
    body_seconds: float = Field(10.0, gt=0)
    """For a request's head and then its body to arrive, and for any piece of an answer to be taken by its reader."""
    requests_per_minute: int = Field(120, ge=1)
    """Of one caller: in any 60 s in this process, and in a minute of the clock in all processes together, where each
    may exceed it by a tenth."""
    concurrent_per_caller: int = Field(8, ge=1)
    """Those in the waiting room count."""
    concurrent: int | None = Field(None, ge=1)
    """Searches that are worked on at once; a plain read counts a quarter. None: as many as the process has processors,
    2 at least and 4 at most; four times that where a search waits for a server that embeds or reranks. More make each
    slower: what is beyond the machine's own pace waits better in the waiting room, where tenants take turns."""
    answers_at_once: int = Field(32, ge=1)
    """Answers that are under way at once. Once its passages are found an answer waits for the model, and no longer
    holds a search's place."""
    waiting: int = Field(64, ge=0)
    """Requests that wait for a place, of each kind; who has more than its share of them is sent away with 429, and with
    503 where all have the same …"""
    waiting_seconds: float = Field(2.0, gt=0)
    """… and so is one that has waited this long."""
    limits_file: Path | None = None
    """TOML of tenants' weights and budgets a day: ``[default]`` and ``[tenant.NAME]`` with ``weight``,
    ``requests_per_day``, ``tokens_per_day``, ``money_per_day``, and the same three in ``caller`` for each caller. Read
    again when it changes. None: there is no budget."""
    search_seconds: float = Field(10.0, gt=0)
    """For a whole search, reranking included; its parts are given shares of it (query.retrieval.timeouts.py)."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a request's Host header may have, without the port. Empty: any (in development: loopback's only)."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call from a browser (CORS). Empty: only the page that the service itself serves."""
    url: str | None = None
    """Where `penstock up` serves: the local stack writes it to endpoints.json."""


class AuthSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_AUTH_", frozen=True, extra="forbid")

    jwks_url: str | None = None
    """Where the issuer publishes its keys: https, or http on loopback. Needs issuer and audience."""
    issuer: str | None = None
    audience: str | None = None
    algorithms: tuple[Literal["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"], ...] = ("RS256",)
    leeway_seconds: float = Field(30.0, ge=0, le=300)
    """By which the issuer's clock may differ from ours."""
    jwks_keep_seconds: float = Field(86_400.0, gt=0)
    """How long the keys that we know go on being believed while the issuer cannot be reached."""
    tenant: str | None = None
    """Of everybody, where one service answers one tenant. None: the token's ``tenant_claim``."""
    tenant_claim: str = "tenant"
    principal_claim: str = "email"
    """Whose value is what `identities.v1` calls a principal, code point by code point."""
    unverified_email: Literal["refuse", "accept"] = "refuse"
    """What becomes of a token whose principal is its ``email`` and that lacks ``email_verified: true``. Accept it only
    from an issuer that gives out no address without having verified it, and has no such claim (Microsoft Entra)."""
    max_token_hours: float = Field(24.0, gt=0)
    """Longest validity of a token, from ``iat`` to ``exp``."""
    roles_claim: str = "roles"
    operator_role: str = "penstock-operator"
    """Who holds it among the roles may see the pipeline, the review queue and every document's story."""
    extended_role: str = "penstock-extended"
    """Who holds it has the budgets of the extended class."""
    keys_file: Path | None = None
    """TOML of services' API keys, by name: ``sha256`` of the key, ``expires``, ``tenant``, ``tags`` or ``principal``,
    ``class``, ``operator``. Read again when it changes."""


class FeedbackSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_FEEDBACK_", frozen=True, extra="forbid")

    keys: SecretStr | None = None
    """Secrets of the installation, separated by spaces, at least 32 characters each: who gave feedback is stored as a
    digest with the first; the others find what was given before it took their place. None: feedback is not kept, but in
    development mode, where a key is made in PENSTOCK_HOME."""

    @field_validator("keys")
    @classmethod
    def _long(cls, keys: SecretStr | None) -> SecretStr | None:
        if keys and any(len(key) < SHORTEST_SECRET for key in keys.get_secret_value().split()):
            raise ValueError(f"a key has at least {SHORTEST_SECRET} characters: `openssl rand -base64 33` makes one")
        return keys

    def secrets(self, *, make: bool = False) -> list[bytes]:
        """The keys, or the one in PENSTOCK_HOME. make: if there is none. Raises Misconfigured."""
        keys = self.keys.get_secret_value().split() if self.keys else []
        file = home() / FEEDBACK_FILE
        if not keys and make:
            made_secret(file)
        if not keys:
            with suppress(FileNotFoundError):
                keys = [secret(file)]
        return [key.encode() for key in keys]


class ShadowSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SHADOW_", frozen=True, extra="forbid")

    share: float = Field(0.0, ge=0, le=1)
    """Of the questions that are also asked of the generation that is being built, or of the previous one; 0: none."""
    at_once: int = Field(2, ge=1)
    """Of them; a question that finds so many under way is let go."""


class EvalSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_EVAL_", frozen=True, extra="forbid")

    every_seconds: float = Field(900.0, gt=0)
    """Between two runs of the golden judgements."""
    ndcg_floor: float = Field(0.82, ge=0, le=1)
    faithfulness_floor: float = Field(0.90, ge=0, le=1)
    answers: int = Field(20, ge=0)
    """Golden questions a run that are also answered and judged, the next ones at the next run; 0: none."""


class QuerySettings(Part):
    """All parts of the query service's own. Build one with ``load()``."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", frozen=True, extra="ignore")

    retrieval: RetrievalSettings = Field(default_factory=RetrievalSettings)
    rerank: RerankSettings = Field(default_factory=RerankSettings)
    chat: ChatSettings = Field(default_factory=ChatSettings)
    serve: ServeSettings = Field(default_factory=ServeSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    evaluation: EvalSettings = Field(default_factory=EvalSettings)
    shadow: ShadowSettings = Field(default_factory=ShadowSettings)
    feedback: FeedbackSettings = Field(default_factory=FeedbackSettings)


def load() -> QuerySettings:
    """Settings as they are now. Raises Misconfigured with one line that names the variable."""
    try:
        return QuerySettings()
    except ValidationError as error:
        raise explained(error) from error
