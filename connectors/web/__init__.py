"""The HTTP client for sources: obeys rate limits, sends credentials to the configured address only, and connects to
permitted addresses only."""

from connectors.errors import Answered, Denied, Forbidden, Missing, Rejected, ServerFailed, TooLarge
from connectors.web.client import Fetched, Web
from connectors.web.limits import Limits, throttled
from connectors.web.transport import Resolver, system_resolver

__all__ = [
    "Answered",
    "Denied",
    "Fetched",
    "Forbidden",
    "Limits",
    "Missing",
    "Rejected",
    "Resolver",
    "ServerFailed",
    "TooLarge",
    "Web",
    "system_resolver",
    "throttled",
]
