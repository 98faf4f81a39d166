"""The query service's settings. Sources and errors as in ``pipeline.runtime.settings``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import SettingsConfigDict

from pipeline.runtime.home import FEEDBACK_FILE, SHORTEST_SECRET, home, made_secret, secret
from pipeline.runtime.settings import Part, explained


class RankingSettings(Part):
    """How candidates become a ranking. Each of them can be tried beside the current one (``ShadowSettings``)."""

    keyword_weight: float = Field(1.0, ge=0, le=10)
    """The weight of keyword scores in the fusion, where that of vector scores is 1. 0: keyword search only proposes
    candidates."""
    feedback: bool = True
    """Whether a hybrid search ranks a second time with pseudo-relevance feedback (query/retrieval/feedback.py). It
    ranks better and takes nearly half as much time again."""
    neighbour_weight: float = Field(0.5, ge=0, lt=1)
    """How much of the mean score of its nearest candidates each candidate gains, as the last part of feedback
    (docs/adr/0083-neighbours.md). With more, searches for one known document lose; 0: nothing."""
    per_document: int = Field(2, ge=1)
    """The most passages of one document in a result list, as long as other documents have passages left."""
    ef_search: int | None = Field(None, ge=40, le=1_000)
    """The size of the candidate list of a search through the vectors' graph in Postgres. With a larger one, a search
    misses fewer of the nearest passages and takes longer. None: 300 up to 100,000 passages, and for more of them a list
    that grows with the square root of their number."""
    cosine_floor: float | None = Field(None, ge=-1, le=1)
    """The least cosine of the nearest passage to a question that is answered. None: the floor that was calibrated for
    the generation (docs/generations.md); -1: every question is answered from whatever is nearest."""
    coverage_floor: float = Field(0.75, gt=0)
    """A passage with this share of the question's words is relevant, unless its cosine is that of most unrelated
    questions; above 1: words do not count."""


class RetrievalSettings(RankingSettings):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_QUERY_", frozen=True, extra="forbid")

    feedback_at_once: int = Field(4, ge=0)
    """The most concurrent searches that use feedback: while more run, all do without it. 0: none uses it."""
    cached_queries: int = Field(2_000, ge=0)
    """The most embedded queries, and the most results, that are cached; 0 disables both caches, and the sharing of
    embeddings by concurrent callers. Results take 64 MiB at most: some 1,400 of ten passages of 2,500 characters."""
    standard_tokens: int = Field(30_000, ge=1)
    """How many tokens of a model's window documents may fill for callers of the standard class (counted as cl100k)."""
    extended_tokens: int = Field(150_000, ge=1)
    """The same for callers of the extended class."""
    personal_sources: frozenset[str] = frozenset()
    """Sources that hold one person's own documents, which are searched by meaning and by time."""


Flavour = Literal["cohere", "jina", "tei", "vllm"]


class RerankerSettings(Part):
    """The reranker, and how much of a ranking it decides. Each of them can be tried beside the current one."""

    url: str | None = None
    """The address, with its path, of a server that speaks Cohere's rerank protocol (Jina, TEI, vLLM, Cohere). None:
    there is no reranking over HTTP."""
    flavour: Flavour = "cohere"
    """The dialect of the requests. The responses of all dialects are understood."""
    api_key: SecretStr | None = None
    """The key of that server."""
    model: str = ""
    """The name of the model that the server is asked for."""
    onnx_path: Path | None = None
    """The folder of a cross-encoder (``model.onnx`` and ``tokenizer.json``) that runs in the service itself."""
    plugin: str | None = None
    """A reranker that an installed package offers in the group ``penstock.rerankers``, by its name."""
    pool: int = Field(50, ge=2, le=200)
    """How many passages are reranked."""
    floor: float | None = None
    """The least score of a passage that is relevant, on the reranker's own scale. None: the one that `penstock
    generation calibrate` measured for this reranker; without either, the cosine decides."""


class RerankSettings(RerankerSettings):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_RERANK_", frozen=True, extra="forbid")

    top: int = Field(5, ge=1, le=20)
    """How many reranked passages an answer is made from, unless the caller requests another number."""
    timeout_seconds: float = Field(1.0, gt=0)
    """A search does not wait longer for the reranker: the order of the fusion stays."""
    price_per_thousand_searches: float = Field(0.0, ge=0)
    """The provider's price, in any currency: the unit of ``penstock_query_rerank_cost_total``."""
    cached_pairs: int = Field(100_000, ge=0)
    """The most scores that are cached, by question and passage (about 200 bytes each); 0 caches none."""


class ChatSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CHAT_", frozen=True, extra="forbid")

    base_url: str | None = None
    """The address of an OpenAI-compatible server, with ``/v1``. With neither this nor an api_key, `ask` returns cited
    passages and says so."""
    api_key: SecretStr | None = None
    """The key of that server."""
    model: str = ""
    """The name of the model that the server is asked for."""
    window_tokens: int = Field(128_000, ge=2_048)
    """The model's window: the most tokens of a prompt and its answer."""
    answer_tokens: int = Field(1_024, ge=16)
    """The most tokens of an answer."""
    context_tokens: int = Field(6_000, ge=256)
    """How many tokens retrieved passages may fill (counted as cl100k), but for those of a personal collection, which
    have the budget of the caller's class."""
    temperature: float | None = Field(None, ge=0, le=2)
    """None: the model's default (some models refuse any other value)."""
    price_per_million_prompt_tokens: float = Field(0.0, ge=0)
    """The provider's price of what it reads, in any currency: the unit of ``penstock_query_answer_cost_total``."""
    price_per_million_answer_tokens: float = Field(0.0, ge=0)
    """The provider's price of what it writes, in the same currency."""
    first_token_seconds: float = Field(20.0, gt=0)
    """The time limit until the first token of an answer arrives."""
    timeout_seconds: float = Field(60.0, gt=0)
    """The time limit of the whole answer."""

    def money(self, *, prompt: int, answer: int) -> float:
        """The price of so many tokens."""
        of_prompt = prompt * self.price_per_million_prompt_tokens
        return (of_prompt + answer * self.price_per_million_answer_tokens) / 1_000_000


class ServeSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SERVE_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """The address on which the service listens."""
    port: int = Field(8080, ge=0, le=65535)
    """0: any free port."""
    development: bool = False
    """Development mode: a client with the token of ``development_token_file`` chooses its own identity. It is served
    on loopback only, and the log warns of it."""
    development_token_file: Path | None = None
    """This file is created at start, readable by this user alone, and is read at each request. None:
    ``development-token`` in PENSTOCK_HOME."""
    max_body_bytes: int = Field(1_000_000, ge=1_000)
    """The largest body of a request."""
    body_seconds: float = Field(10.0, gt=0)
    """The time limit for a request's headers to arrive, for its body to arrive, and for a client to read any piece of a
    response."""
    requests_per_minute: int = Field(120, ge=1)
    """The rate limit of one caller: in any 60 s in this process, and in a minute of the clock in all processes
    together, where each process may exceed it by a tenth. There, a request that stores more than 8 KiB counts as
    several (docs/adr/0119-what-a-caller-stores.md)."""
    concurrent_per_caller: int = Field(8, ge=1)
    """The most concurrent requests of one caller, including those in the queue."""
    concurrent: int | None = Field(None, ge=1)
    """The most concurrent searches; a plain read counts as a quarter of one. None: as many as the process has
    processors, at least 2 and at most 4, and four times that where a search waits for a remote server that embeds or
    reranks. More would make each search slower; in the queue, tenants take turns."""
    answers_at_once: int = Field(32, ge=1)
    """The most concurrent answers. An answer gives up its search slot once its passages are retrieved and it waits for
    the model."""
    waiting: int = Field(64, ge=0)
    """The most requests of each kind that wait for a slot. Beyond it a request is refused: with 429 where its caller
    has more than its share of the queue, with 503 where all have the same."""
    waiting_seconds: float = Field(2.0, gt=0)
    """A request that has waited this long is refused in the same way."""
    limits_file: Path | None = None
    """A TOML file of the tenants' weights and daily budgets: ``[default]`` and ``[tenant.NAME]`` with ``weight``,
    ``requests_per_day``, ``tokens_per_day``, ``money_per_day``, and the same three budgets in ``caller`` for each
    caller. It is read again when it changes. None: there are no budgets."""
    standing_questions: int = Field(100, ge=0)
    """The most standing questions of one principal (docs/standing.md)."""
    search_seconds: float = Field(10.0, gt=0)
    """The time limit of a whole search, including reranking. Its parts get shares of it
    (query/retrieval/timeouts.py)."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted host names of a request's Host header, without the port. Empty: any (in development mode, only those of
    loopback)."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the service from a browser (CORS). Empty: only the service's own page."""
    url: str | None = None
    """The address at which `penstock up` serves; the local stack writes it to endpoints.json."""


Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"]


class AuthSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_AUTH_", frozen=True, extra="forbid")

    jwks_url: str | None = None
    """The address at which the issuer publishes its keys: https, or http on loopback. It requires ``issuer`` and
    ``audience``."""
    issuer: str | None = None
    """The ``iss`` that a token must have."""
    audience: str | None = None
    """The ``aud`` that a token must have."""
    algorithms: tuple[Algorithm, ...] = ("RS256",)
    """The signature algorithms that are accepted."""
    leeway_seconds: float = Field(30.0, ge=0, le=300)
    """How far the issuer's clock may differ from ours."""
    jwks_keep_seconds: float = Field(86_400.0, gt=0)
    """How long cached keys stay valid while the issuer cannot be reached."""
    tenant: str | None = None
    """The tenant of every token, for a service of one tenant. None: the token's ``tenant_claim`` names it."""
    tenant_claim: str = "tenant"
    """The claim that names the tenant."""
    principal_claim: str = "email"
    """The claim that holds the principal, which equals that of `identities.v1` code point by code point."""
    unverified_email: Literal["refuse", "accept"] = "refuse"
    """Whether a token is accepted whose principal is its ``email`` and that lacks ``email_verified: true``. Accept it
    only from an issuer that verifies every address and has no such claim (Microsoft Entra)."""
    max_token_hours: float = Field(24.0, gt=0)
    """The longest validity of a token that is accepted, from ``iat`` to ``exp``."""
    roles_claim: str = "roles"
    """The claim that lists the roles of the caller."""
    operator_role: str = "penstock-operator"
    """A caller with this role may see the pipeline, the review queue and every document's history."""
    extended_role: str = "penstock-extended"
    """A caller with this role belongs to the extended class and has its token budget."""
    keys_file: Path | None = None
    """A TOML file of the API keys of services, by name: ``sha256`` of the key, ``expires``, ``tenant``, ``tags`` or
    ``principal``, ``class``, ``operator``. It is read again when it changes."""


class FeedbackSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_FEEDBACK_", frozen=True, extra="forbid")

    keys: SecretStr | None = None
    """Secrets of the installation, separated by spaces, at least 32 characters each. The author of feedback is stored
    as a digest that is keyed with the first; the others are older keys, which find earlier feedback. None: feedback is
    not stored, except in development mode, where a key is created in PENSTOCK_HOME."""

    @field_validator("keys")
    @classmethod
    def _long(cls, keys: SecretStr | None) -> SecretStr | None:
        if keys and any(len(key) < SHORTEST_SECRET for key in keys.get_secret_value().split()):
            raise ValueError(
                f"a key has at least {SHORTEST_SECRET} characters: create one with `openssl rand -base64 33`"
            )
        return keys

    def secrets(self, *, make: bool = False) -> list[bytes]:
        """The configured keys, else the one in PENSTOCK_HOME. make: create one if there is none. Raises
        Misconfigured."""
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
    """The share of searches that also run on the generation that is being built, or on the previous one, and by the
    candidate settings of ranking, if there are any; 0: none."""
    at_once: int = Field(2, ge=1)
    """The most concurrent shadow queries; beyond it, a search is not shadowed."""
    seconds: float = Field(20.0, gt=0)
    """A shadow query that takes longer is given up, and counted as failed."""


class CandidateRanking(RankingSettings):
    """Settings of ranking that may take the place of the current ones: shadow queries and `penstock golden compare`
    compare both. What is not set is as it is, whatever its default here."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SHADOW_QUERY_", frozen=True, extra="forbid")


class CandidateReranker(RerankerSettings):
    """The same for the reranker. Another address takes the place of the current reranker, without its key and its
    floor; an empty ``PENSTOCK_SHADOW_RERANK_URL`` stands for none."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_SHADOW_RERANK_", frozen=True, extra="forbid")


class EvalSettings(Part):
    model_config = SettingsConfigDict(env_prefix="PENSTOCK_EVAL_", frozen=True, extra="forbid")

    every_seconds: float = Field(900.0, gt=0)
    """The interval between two runs of the golden questions."""
    ndcg_floor: float = Field(0.82, ge=0, le=1)
    """An alert fires while the golden questions' mean nDCG@5 is lower."""
    faithfulness_floor: float = Field(0.90, ge=0, le=1)
    """An alert fires while the mean faithfulness of their answers is lower."""
    answers: int = Field(20, ge=0)
    """How many golden questions each run also answers and judges, always the same ones. 0: none."""
    judge_model: str = ""
    """The name of the model that judges answers. It should be another one than PENSTOCK_CHAT_MODEL, because a model
    judges its own answers more favourably. Empty: the answering model judges."""
    judge_base_url: str | None = None
    """The address of the judging model's server, with ``/v1``. None: that of the answering model."""
    judge_api_key: SecretStr | None = None
    """The key of the judging model's server. None: that of the answering model if both have the same server, otherwise
    none."""


class QuerySettings(Part):
    """All settings that only the query service has. ``load()`` builds them."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_", frozen=True, extra="ignore")

    retrieval: RetrievalSettings = Field(default_factory=RetrievalSettings)
    rerank: RerankSettings = Field(default_factory=RerankSettings)
    chat: ChatSettings = Field(default_factory=ChatSettings)
    serve: ServeSettings = Field(default_factory=ServeSettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    evaluation: EvalSettings = Field(default_factory=EvalSettings)
    shadow: ShadowSettings = Field(default_factory=ShadowSettings)
    candidate_ranking: CandidateRanking = Field(default_factory=CandidateRanking)
    candidate_reranker: CandidateReranker = Field(default_factory=CandidateReranker)
    feedback: FeedbackSettings = Field(default_factory=FeedbackSettings)

    def candidate(self) -> QuerySettings | None:
        """These settings with the candidate ones in their place; None if there are none that differ.

        Another reranker takes the place of the current one: whatever else named that one, its key and its floor do not
        hold for the other.
        """
        ranking = _set_in(self.candidate_ranking)
        reranker = _set_in(self.candidate_reranker)
        reranker |= {name: reranker[name] or None for name in _ADDRESSES if name in reranker}
        if any(reranker[name] != getattr(self.rerank, name) for name in _ADDRESSES if name in reranker):
            reranker = {**dict.fromkeys((*_ADDRESSES, "api_key", "floor")), **reranker}
        elif reranker.get("model", self.rerank.model) != self.rerank.model:
            reranker = {"floor": None, **reranker}
        candidate = self.model_copy(
            update={
                "retrieval": self.retrieval.model_copy(update=ranking),
                "rerank": self.rerank.model_copy(update=reranker),
            }
        )
        return None if (candidate.retrieval, candidate.rerank) == (self.retrieval, self.rerank) else candidate


_ADDRESSES = ("url", "onnx_path", "plugin")
"""The settings that name a reranker."""


def _set_in(part: Part) -> dict[str, object]:
    return {name: getattr(part, name) for name in part.model_fields_set}


def differences(current: QuerySettings, candidate: QuerySettings) -> tuple[str, ...]:
    """The settings of ranking that differ, for people: ``QUERY_KEYWORD_WEIGHT 1.3 instead of 1.0``. They hold no
    secret: of a key only that it differs, and of an address neither a password nor a query."""
    parts = (
        ("QUERY", RankingSettings, current.retrieval, candidate.retrieval),
        ("RERANK", RerankerSettings, current.rerank, candidate.rerank),
    )
    return tuple(
        f"{prefix}_{name.upper()} {_shown(after)} instead of {_shown(before)}"
        for prefix, part, now, then in parts
        for name in part.model_fields
        if (before := getattr(now, name)) != (after := getattr(then, name))
    )


def _shown(value: object) -> str:
    if isinstance(value, SecretStr):
        return "a key"
    if isinstance(value, str) and "://" in value:
        url = urlsplit(value)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    return "none" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


def load() -> QuerySettings:
    """The current settings. Raises Misconfigured with one line that names the variable."""
    try:
        return QuerySettings()
    except ValidationError as error:
        raise explained(error) from error
