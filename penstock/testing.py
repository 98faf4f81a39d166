"""A playground for a source of your own, built from a dictionary of documents (docs/connectors/your-own.md). It needs
the extra ``conform``."""

from __future__ import annotations

from penstock.packages import check

check()

try:
    from connectors.conform.samples import Sample, Samples, in_folder, over_http
except ModuleNotFoundError as error:
    raise ImportError(
        "this needs the contract suite: pip install 'penstock[conform]'", name="penstock_testing"
    ) from error

__all__ = ["Sample", "Samples", "in_folder", "over_http"]
