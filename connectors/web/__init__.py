"""The HTTP client for sources: waits when told to, keeps credentials at home, and asks no address it may not ask."""

from connectors.web.addresses import Resolver, system_resolver
from connectors.web.client import Web
from connectors.web.errors import Answered, Denied, Forbidden, Missing, Rejected, TooLarge
from connectors.web.limits import Limits
from connectors.web.pace import throttled

__all__ = [
    "Answered", "Denied", "Forbidden", "Limits", "Missing", "Rejected", "Resolver", "TooLarge", "Web",
    "system_resolver", "throttled",
]  # fmt: skip
