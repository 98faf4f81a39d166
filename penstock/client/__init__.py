"""The client of the query service (docs/clients.md): ``Client`` blocks, ``AsyncClient`` does not."""

from __future__ import annotations

from penstock.packages import check

check()

from penstock.client.clients import AsyncClient, Client  # noqa: E402
from penstock.client.errors import (  # noqa: E402
    ClientError,
    InvalidField,
    InvalidResponse,
    ProblemError,
    TokenUnavailable,
    Unreachable,
)
from penstock.client.models import (  # noqa: E402
    AnswerEvent,
    AnswerMode,
    AnswerResponse,
    AtLeastResponse,
    CallerResponse,
    ChunkReference,
    Citation,
    CitationEvent,
    DeltaEvent,
    DocumentResponse,
    Facet,
    FacetsResponse,
    FacetValue,
    KeyConditions,
    NumberedResult,
    PipelineResponse,
    ReviewResponse,
    SearchFilters,
    SearchMode,
    SearchResponse,
    SearchResult,
    SearchSort,
    SourcesEvent,
    Step,
    StoryResponse,
    Turn,
)
from penstock.client.token import AsyncToken, Token  # noqa: E402

__all__ = [
    "AnswerEvent",
    "AnswerMode",
    "AnswerResponse",
    "AsyncClient",
    "AsyncToken",
    "AtLeastResponse",
    "CallerResponse",
    "ChunkReference",
    "Citation",
    "CitationEvent",
    "Client",
    "ClientError",
    "DeltaEvent",
    "DocumentResponse",
    "Facet",
    "FacetValue",
    "FacetsResponse",
    "InvalidField",
    "InvalidResponse",
    "KeyConditions",
    "NumberedResult",
    "PipelineResponse",
    "ProblemError",
    "ReviewResponse",
    "SearchFilters",
    "SearchMode",
    "SearchResponse",
    "SearchResult",
    "SearchSort",
    "SourcesEvent",
    "Step",
    "StoryResponse",
    "Token",
    "TokenUnavailable",
    "Turn",
    "Unreachable",
]
