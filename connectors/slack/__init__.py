"""Slack: threads of channels as documents, membership as access."""

from connectors.slack.options import SlackOptions
from connectors.slack.source import Slack

__all__ = ["Slack", "SlackOptions"]
