"""The HTTP client for sources: waits when told to, keeps credentials at home, and asks no address it may not ask."""

from connectors.web.client import Web
from connectors.web.errors import Answered, Denied, Forbidden, Missing, Rejected, TooLarge
from connectors.web.limits import Limits, throttled
from connectors.web.transport import Resolver, system_resolver

__all__ = [
    "Answered",
    "Denied",
    "Forbidden",
    "Limits",
    "Missing",
    "Rejected",
    "Resolver",
    "TooLarge",
    "Web",
    "system_resolver",
    "throttled",
]
