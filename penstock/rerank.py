"""A reranker, offered in the group ``penstock.rerankers`` (docs/plugins.md). It needs the extra ``query``."""

from __future__ import annotations

from penstock.packages import check

check()

from pipeline.core.errors import Deferred, Misconfigured, Poison, Retryable  # noqa: E402
from query.rerank.reranker import Reranker  # noqa: E402
from query.settings import RerankSettings  # noqa: E402

__all__ = ["Deferred", "Misconfigured", "Poison", "RerankSettings", "Reranker", "Retryable"]
