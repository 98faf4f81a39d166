"""Slack: threads of channels as documents, membership as access."""

from connectors.slack.connector import Slack
from connectors.slack.options import SlackOptions

__all__ = ["Slack", "SlackOptions"]
