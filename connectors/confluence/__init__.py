"""Confluence, Cloud and Data Center: see docs/connectors/confluence.md."""

from connectors.confluence.options import ConfluenceOptions
from connectors.confluence.source import Confluence

__all__ = ["Confluence", "ConfluenceOptions"]
