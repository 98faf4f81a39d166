"""Elasticsearch: its client, its errors, and the one index mapping that readers may rely on."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from elasticsearch import (
    ApiError,
    AsyncElasticsearch,
    ConnectionTimeout,
    NotFoundError,
    SerializationError,
    TransportError,
    UnsupportedProductError,
)
from elasticsearch import ConnectionError as UnreachableError

from pipeline.core.certificates import refused_ours, untrusted
from pipeline.core.errors import Deferred, Misconfigured, Retryable
from pipeline.core.languages import ANALYSED
from pipeline.core.retry import retry_after_seconds
from pipeline.runtime.settings import ElasticsearchSettings

METADATA_IGNORE_ABOVE = 8_000
"""Characters of one metadata value; a longer one is kept but not searched. Lucene takes 32,766 bytes a term."""

ANALYSIS: Mapping[str, Any] = {
    "analyzer": {
        "body": {"type": "english"},
        # Unstemmed. PROJ-4821 becomes two neighbouring terms, foo_bar and 10.0.0.1 stay one: see `identifiers`.
        "exact": {"type": "standard"},
    }
}
SIMILARITY: Mapping[str, Any] = {"default": {"type": "BM25", "k1": 1.5, "b": 0.75}}

ANALYSED_FIELDS = ("headings", "text", "title", "title_words")
"""The fields of an entry that have another analyzer for another language."""

MAPPING: Mapping[str, Any] = {
    "dynamic": "strict",
    "properties": {
        "document_id": {"type": "keyword"},
        "tenant": {"type": "keyword"},
        "source": {"type": "keyword"},
        "external_id": {"type": "keyword"},
        "title": {
            "type": "text",
            "analyzer": "body",
            "fields": {"raw": {"type": "keyword", "ignore_above": 1_024}},
        },
        "title_words": {"type": "text", "analyzer": "body"},  # pipeline.core.identifiers.words_of_names
        "headings": {"type": "text", "analyzer": "body"},
        "text": {"type": "text", "analyzer": "body", "fields": {"exact": {"type": "text", "analyzer": "exact"}}},
        # What must be found exactly, and its parts: recognised by us (pipeline.core.identifiers), not by an analyzer.
        "identifiers": {"type": "keyword", "doc_values": False},
        "acl_tags": {"type": "keyword"},
        "required_tags": {"type": "keyword"},
        "required_count": {"type": "integer"},
        "source_url": {"type": "keyword", "index": False, "doc_values": False},
        "author": {"type": "keyword"},
        "media_type": {"type": "keyword"},
        "source_modified_at": {"type": "date"},
        "metadata": {"type": "flattened", "ignore_above": METADATA_IGNORE_ABOVE},
        "keys": {"type": "keyword"},  # terms of declared keys: pipeline.core.metadata_keys
        # Title, headings and text once more, of chunks in another language: pipeline.core.languages. The analyzers are
        # named as the server knows them, not in ANALYSIS, because a live index takes no new analysis.
        "analysed": {
            "properties": {
                language: {"properties": {name: {"type": "text", "analyzer": language} for name in ANALYSED_FIELDS}}
                for language in ANALYSED
            }
        },
    },
}
"""One entry a chunk; ``_id`` is the chunk id, ``_version`` the ledger's seq. Frozen: other teams read it."""

ADDED_FIELDS = ("keys", "analysed", "title_words")
"""Fields that an index of an earlier version may lack, wholly or in part. No entry in it has them, so ``extend_index``
adds them to the mapping of the live index."""

VECTOR, HAS_VECTOR = "embedding", "embedded"
"""The fields of an entry's vector, in a generation whose vectors are searched here."""
OVERSAMPLE = 3.0
"""How many times the requested number of candidates are compared by their whole vectors after the walk, which compares
quantised ones."""
LEAST_QUANTISED = 64
"""The fewest dimensions that Elasticsearch quantises to one bit each."""

REFRESH_INTERVAL = "30s"
"""Writers refresh explicitly before they report success (pipeline.stores.refresh). The server's own refresh serves
changes that nobody waits for; at its default of one second it would create a needless segment each second."""

GC_DELETES = "10m"
"""How long Elasticsearch remembers the version of a deleted entry (its default: 60 s). Longer than a bulk of a worker
that died normally takes to arrive, and than twice the pause after which the deletes of a bulk are repeated
(pipeline.stages.keywords.CHECK_SECONDS). 300 deletes a second for ten minutes are about 40 MB of heap."""

MERGE_POLICY: Mapping[str, Any] = {"deletes_pct_allowed": 40, "floor_segment": "200kb"}
"""Merging dominated Elasticsearch's work at 100 edits a second. Every edit supersedes entries, and merging one away
rewrites the others of its segment: a higher share of deletes (the server's default: 20) rewrites fewer. A second's
segment is smaller than the default floor of 2 MB, below which all segments count as equal, so that large ones were
merged again and again with small ones. Entries merged for 6,000 that were written: 51,000 by default, now 22,000."""


def mapping(dimensions: int | None) -> dict[str, Any]:
    """The mapping of an index. dimensions: of the vectors that its entries carry; None: they carry none.

    ``_source`` leaves the vectors out: the chunk table has them.
    """
    if dimensions is None:
        return dict(MAPPING)
    quantised = dimensions >= LEAST_QUANTISED
    vector = {
        "type": "dense_vector",
        "dims": dimensions,
        "index": True,
        "similarity": "cosine",
        "index_options": {
            "type": "bbq_hnsw" if quantised else "hnsw",
            "m": 16,
            "ef_construction": 100,
            **({"rescore_vector": {"oversample": OVERSAMPLE}} if quantised else {}),
        },
    }
    return {
        **MAPPING,
        "_source": {"excludes": [VECTOR]},
        "properties": {**MAPPING["properties"], VECTOR: vector, HAS_VECTOR: {"type": "boolean"}},
    }


def connect(settings: ElasticsearchSettings, *, reads_only: bool = False) -> AsyncElasticsearch:
    """A client. Opens no connection yet. It never retries a write by itself: our callers know what a retry means.

    reads_only: it only reads, so that a request which one node does not answer is sent to the next.
    """
    urls = [url.strip() for url in settings.url.split(",")]
    auth: dict[str, Any] = {}
    if settings.api_key:
        auth["api_key"] = settings.api_key.get_secret_value()
    elif settings.username:
        auth["basic_auth"] = (settings.username, settings.password.get_secret_value() if settings.password else "")
    try:
        if "https://" in settings.url:
            auth["ssl_context"] = _context(settings)
        return AsyncElasticsearch(
            urls,
            request_timeout=settings.request_timeout_seconds,
            max_retries=len(urls) - 1 if reads_only else 0,
            retry_on_status=(),
            retry_on_timeout=False,
            **auth,
        )
    except (ValueError, OSError) as error:
        raise Misconfigured(
            f"PENSTOCK_ELASTICSEARCH_URL, _CA_CERTS, _CLIENT_CERT or _CLIENT_KEY: {error}; give e.g."
            " https://search.example.org:9200, and files in PEM"
        ) from error


def _context(settings: ElasticsearchSettings) -> ssl.SSLContext:
    """A TLS context that checks host names: the client's own accepts any host's certificate for a numeric address."""
    context = ssl.create_default_context(cafile=settings.ca_certs)
    if settings.client_cert:
        context.load_cert_chain(settings.client_cert, settings.client_key, "")  # or OpenSSL asks a terminal
    return context


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Elasticsearch's exceptions as ours: Retryable or Misconfigured. ``doing`` opens the message ("search chunks-g1").

    Server texts are not repeated (they quote documents): only the error's type and status are.
    """
    try:
        yield
    except ApiError as error:
        raise from_api_error(error, doing) from error
    except UnsupportedProductError as error:
        raise Misconfigured(f"{doing}: the server is not Elasticsearch; check PENSTOCK_ELASTICSEARCH_URL") from error
    except SerializationError as error:
        raise Retryable(
            f"{doing}: the answer is not Elasticsearch's (a proxy's error page?)", service="elasticsearch"
        ) from error
    except ConnectionTimeout as error:
        raise Retryable(
            f"{doing}: Elasticsearch did not answer in time; it may or may not have done it", service="elasticsearch"
        ) from error
    except UnreachableError as error:
        text = str(error.message)  # str(error) says that there is an error
        if why := _refused(text):
            raise Misconfigured(f"{doing}: Elasticsearch: {why}", service="elasticsearch") from error
        hung_up = "disconnected" in text.lower() or "reset by peer" in text.lower()
        hint = " (it closes the connection: check whether it requires https)" if hung_up else ""
        raise Retryable(f"{doing}: Elasticsearch cannot be reached{hint}", service="elasticsearch") from error
    except TransportError as error:
        raise Retryable(
            f"{doing}: the connection to Elasticsearch failed ({type(error).__name__})", service="elasticsearch"
        ) from error


def _refused(text: str) -> str | None:
    """Why there is no connection, where only other settings help; None when it is for another reason."""
    untrusting = untrusted(text, authority="PENSTOCK_ELASTICSEARCH_CA_CERTS", address="PENSTOCK_ELASTICSEARCH_URL")
    ours = refused_ours(text, setting="PENSTOCK_ELASTICSEARCH_CLIENT_CERT and _CLIENT_KEY")
    plain = "WRONG_VERSION_NUMBER" in text or "record layer failure" in text
    return (
        untrusting
        or ours
        or ("it does not use TLS: check whether PENSTOCK_ELASTICSEARCH_URL should begin with http" if plain else None)
    )


def from_api_error(error: ApiError, doing: str) -> Retryable | Misconfigured:
    """Translate a response other than 2xx to a whole request."""
    status, kind = error.status_code, error_type(error.body)
    if status == 429 or status == 408 or status >= 500:
        kind_of_error = Deferred if status == 429 else Retryable
        return kind_of_error(
            f"{doing}: Elasticsearch is overloaded or restarting ({status} {kind})",
            retry_after=retry_after_seconds(error.meta.headers, now=datetime.now(UTC)),
            service="elasticsearch",
        )
    if status in (401, 403):
        return Misconfigured(
            f"{doing}: Elasticsearch refuses ({status} {kind}); check PENSTOCK_ELASTICSEARCH_API_KEY or _USERNAME and"
            " their privileges",
            service="elasticsearch",
        )
    if kind == "index_not_found_exception":
        what = "the index does not exist; run `penstock rebuild keywords`"
        return Misconfigured(f"{doing}: {what}", service="elasticsearch")
    return Misconfigured(f"{doing}: Elasticsearch refuses the request ({status} {kind})", service="elasticsearch")


def error_type(body: object) -> str:
    """The type in an error body: a bounded word such as ``mapper_parsing_exception``, never its text; "" if none."""
    error = body.get("error") if isinstance(body, Mapping) else None
    return str(error.get("type", ""))[:100] if isinstance(error, Mapping) else ""


async def create_index(
    es: AsyncElasticsearch,
    generation_index: str,
    *,
    shards: int = 1,
    replicas: int = 0,
    refresh_interval: str = REFRESH_INTERVAL,
    dimensions: int | None = None,
) -> None:
    """Make the index, unless it is there. For a bulk load: refresh_interval "-1", replicas 0, then ``tune_index``.
    dimensions: as in ``mapping``.

    An index of another mapping raises Misconfigured. A template of the index's own name keeps it from ever being made
    by anything else: a late write to a dropped index fails, whatever the cluster's ``action.auto_create_index`` says,
    and no template of the cluster changes what is made here.
    """
    with translated(f"create index {generation_index}"):
        await es.indices.put_index_template(
            name=generation_index, index_patterns=[generation_index], priority=1_000, allow_auto_create=False
        )
        try:
            made = await es.indices.create(
                index=generation_index,
                settings={
                    "number_of_shards": shards,
                    "number_of_replicas": replicas,
                    "refresh_interval": refresh_interval,
                    "gc_deletes": GC_DELETES,
                    "translog.durability": "request",
                    "merge.policy": MERGE_POLICY,
                    "similarity": SIMILARITY,
                    "analysis": ANALYSIS,
                },
                mappings=mapping(dimensions),
            )
        except ApiError as error:
            if error_type(error.body) == "resource_already_exists_exception":
                await _add_fields(es, generation_index)
                return await _check_index(es, generation_index, mapping(dimensions))
            if "analyzer" in str(error.body) and error.status_code == 400:
                raise Misconfigured(
                    f"create index {generation_index}: Elasticsearch lacks an analyzer; the local one gets all of them"
                    " from `python -m deploy.local.fetch`, any other needs its analysis-common module"
                ) from error
            raise
    if not made["shards_acknowledged"]:
        raise Retryable(
            f"create index {generation_index}: its shards have not started yet; check the disk space",
            service="elasticsearch",
        )
    return None


async def extend_index(es: AsyncElasticsearch, index: str) -> None:
    """Add the fields of this version to the mapping of a live index; a missing index is left to its own checks.
    Repeating it is harmless. Raises Retryable or Misconfigured."""
    with translated(f"extend index {index}"):
        try:
            await _add_fields(es, index)
        except NotFoundError:
            return


async def _add_fields(es: AsyncElasticsearch, index: str) -> None:
    response = await es.indices.get_mapping(index=index)
    present = next(iter(response.body.values()))["mappings"].get("properties", {})
    if "document_id" in present and (
        lacking := [name for name in ADDED_FIELDS if present.get(name) != MAPPING["properties"][name]]
    ):
        await es.indices.put_mapping(index=index, properties={name: MAPPING["properties"][name] for name in lacking})


async def _check_index(es: AsyncElasticsearch, index: str, expected: Mapping[str, Any]) -> None:
    """Raise Misconfigured unless the existing index is as ``create_index`` would make it (shards and tuning apart)."""
    response = await es.indices.get(index=index)
    body = next(iter(response.body.values()))
    settings = body["settings"]["index"]
    pairs = {
        **{
            f"field {name}": (body["mappings"].get("properties", {}).get(name), field)
            for name, field in expected["properties"].items()
        },
        "dynamic": (body["mappings"].get("dynamic"), expected["dynamic"]),
        "similarity": (settings.get("similarity"), _as_strings(SIMILARITY)),
        "analysis": (settings.get("analysis"), _as_strings(ANALYSIS)),
    }
    for extra in sorted(body["mappings"].get("properties", {}).keys() - expected["properties"].keys()):
        pairs[f"field {extra}"] = (True, None)
    different = [name for name, (theirs, ours) in pairs.items() if theirs != ours]
    if different:
        raise Misconfigured(
            f"Elasticsearch index {index} has other settings than expected ({', '.join(different[:5])}): run"
            " `penstock rebuild keywords`, or choose another PENSTOCK_ELASTICSEARCH_INDEX_PREFIX"
        )
    if "gc_deletes" not in settings:  # made by a version before this setting; an operator's own value stays
        await es.indices.put_settings(index=index, settings={"gc_deletes": GC_DELETES})


def _as_strings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the server gives them back: every leaf a string."""
    return {k: _as_strings(v) if isinstance(v, Mapping) else str(v) for k, v in settings.items()}


async def tune_index(es: AsyncElasticsearch, index: str, *, replicas: int, refresh_interval: str) -> None:
    """Change what may change on a live index: after a bulk load, or before one."""
    with translated(f"tune index {index}"):
        await es.indices.put_settings(
            index=index, settings={"number_of_replicas": replicas, "refresh_interval": refresh_interval}
        )


async def drop_index(es: AsyncElasticsearch, index: str) -> None:
    """Remove the index; a missing one is fine. Its template stays: a late write must not bring the index back."""
    with translated(f"drop index {index}"):
        await es.indices.delete(index=index, ignore_unavailable=True)
