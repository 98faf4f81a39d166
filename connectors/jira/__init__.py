"""Jira and Jira Service Management, Cloud and Data Center: see docs/connectors/jira.md."""

from connectors.jira.options import JiraOptions
from connectors.jira.source import Jira

__all__ = ["Jira", "JiraOptions"]
