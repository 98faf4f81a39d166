"""What exactly is missing: each thing that reading needs is tried, and told with what would allow it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from connectors.confluence.model import Content, Readers, Site, Space
from connectors.confluence.options import ConfluenceOptions
from connectors.confluence.people import principal
from connectors.protocol import Problem
from connectors.source import Context, CursorExpired
from connectors.web import Answered, Denied, Forbidden, Missing
from pipeline.core.errors import Misconfigured

T = TypeVar("T")
SETTING = {
    "address": "base_url", "refused": "base_url", "settings": "spaces", "no_spaces": "spaces", "nobody": "spaces",
    "events_unsigned": "webhook_secret", "addresses_hidden": "principals",
}  # fmt: skip
"""Where a problem would be mended, by its code; else it is what the token may."""
SPACES = 20
"""So many spaces are looked into."""


def address_advice(options: ConfluenceOptions) -> str:
    if options.flavour == "cloud" and not options.base_url.endswith("/wiki"):
        return f"base_url {options.base_url} lacks /wiki at its end"
    return f"is base_url {options.base_url} the address of Confluence itself, and flavour = {options.flavour} right?"


async def check(site: Site, options: ConfluenceOptions, context: Context) -> Sequence[Problem]:
    return await _Check(site, options, context).run()


class _Check:
    def __init__(self, site: Site, options: ConfluenceOptions, context: Context) -> None:
        self._site, self._options, self._context = site, options, context
        self._problems: list[Problem] = []

    async def run(self) -> Sequence[Problem]:
        options = self._options
        if self._context.events_url and options.webhook_secret is None:
            self._add("events_unsigned", "webhook_secret is not set: every event is refused, only polling works")
        me = await self._try("the account itself", "read:user:confluence", "a valid token", self._site.me)
        if me is None and any(one.code in ("token", "address") for one in self._problems):
            return self._problems
        spaces = await self._try("spaces", "read:space:confluence", "“View” of the spaces", self._site.spaces)
        if spaces is None:
            return self._problems
        if not spaces:
            self._add("no_spaces", "the account sees no space at all: let it view the spaces to be read")
        if me is not None and me.id:
            await self._addresses(me.id)
        groups: set[str] = set()
        for space in list(spaces.values())[:SPACES]:
            groups |= await self._space(space)
        if spaces:
            await self._reading(next(iter(spaces.values())))
        for group in sorted(groups)[:1]:
            await self._try(
                "members of groups", "read:group:confluence and read:user:confluence",
                "“Can use” and, for large groups, browsing users", partial(self._site.members, group),
            )  # fmt: skip
        return self._problems

    async def _space(self, space: Space) -> set[str]:
        what = f"who may read space {space.key}"
        readers: Readers | None = await self._try(
            what, "read:space.permission:confluence (or read:space:confluence)",
            "“Admin” of that space, and Confluence 9.1 or later", lambda: self._site.readers(space),
        )  # fmt: skip
        if readers is None:
            return set()
        if not readers.people and not readers.groups and not (readers.anonymous and self._options.anonymous_tag):
            self._add("nobody", f"space {space.key}: no person and no group may view it, so nobody finds what is in it")
        return set(readers.groups)

    async def _reading(self, space: Space) -> None:
        search = "search:confluence (granular: read:content-details:confluence)"
        await self._try("search", search, "“View” of the spaces", lambda: self._site.changed(5))
        content = "read:page:confluence, read:content.metadata:confluence, " + search
        listing = await self._try(
            f"pages of space {space.key}", content, "“View” of the space",
            lambda: self._site.listing(space, "page", None, full=False),
        )  # fmt: skip
        if listing is None or not listing.found:
            return
        first = listing.found[0].id
        await self._try("view restrictions", "read:content.restriction:confluence", "“View” of the page",
                        lambda: self._site.restriction(first))  # fmt: skip
        found: Sequence[Content] | None = await self._try(
            "a page with its comments", "read:comment:confluence, read:attachment:confluence", "“View” of the page",
            lambda: self._site.get([first]),
        )  # fmt: skip
        if found and found[0].required is None:
            self._add("access_unknown", f"who may read page {first} cannot be told: nobody would find it")

    async def _addresses(self, me: str) -> None:
        scope = "read:user:confluence"
        people = await self._try("names of people", scope, "“Can use”", lambda: self._site.people([me], fresh=True))
        if people and principal(people[me], self._options).startswith("account:"):
            self._add(
                "addresses_hidden",
                "Confluence does not tell the e-mail addresses of people: they are known as account:ID, which matches"
                " nobody elsewhere; set principals"
                + (" or email_domain" if self._options.flavour == "data-center" else ""),
            )

    async def _try(self, what: str, scope: str, permission: str, ask: Callable[[], Awaitable[T]]) -> T | None:
        """None: it went wrong, and is told. Retryable goes on: whether anything is missing cannot be said now."""
        cloud = self._options.flavour == "cloud"
        try:
            return await ask()
        except Denied as error:
            if error.status == 401 and not cloud:
                self._add("token", "the personal access token is not taken (401): is it expired or mistyped?")
            elif error.status == 401 and what == "the account itself":
                advice = "are email and token of the same account, and does base_url fit the kind of token?"
                self._add("token", f"the token is not taken (401), or lacks the scope {scope}: {advice}")
            else:
                needed = f"the scope {scope}" if cloud else f"the permission {permission}"
                self._add(
                    "scope" if cloud else "permission", f"{what} cannot be read ({error.status}): give it {needed}"
                )
        except Missing as error:
            if what == "the account itself":
                self._add("address", f"there is no Confluence ({error.status}): {address_advice(self._options)}")
            else:
                needed = f"needs {permission}" if not cloud else f"needs {permission} and {scope}"
                self._add("missing", f"{what} cannot be read ({error.status}): that {needed}")
        except (Misconfigured, CursorExpired) as error:
            self._add("settings", str(error))
        except Forbidden as error:
            self._add("address", f"{error}: {address_advice(self._options)}")
        except Answered as error:
            self._add("refused", f"{what} cannot be read ({error.status}): {address_advice(self._options)}")
        return None

    def _add(self, code: str, message: str) -> None:
        if not any(one.code == code == "token" for one in self._problems):
            self._problems.append(Problem(SETTING.get(code, "token"), code, message))
