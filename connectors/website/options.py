"""The options of a source that reads a website."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from connectors.base import ReadersOptions
from connectors.folder.patterns import selects


class WebsiteOptions(ReadersOptions):
    """acl_tags, required_tags and members: a website does not say who may read it."""

    url: str
    """Address of the site, ``https://docs.example.com``. Pages elsewhere are not read."""
    allow_private: bool = False
    """Whether the name in an address with http may lead to this machine or a private network. With https the
    certificate proves which site answers; with http its owner could have any server within the network read."""
    sitemaps: tuple[str, ...] = ()
    """Addresses or paths of sitemaps. Empty: those that robots.txt names, else ``/sitemap.xml``, unless there are
    feeds."""
    feeds: tuple[str, ...] = ()
    """Addresses or paths of RSS or Atom feeds, whose entries are pages too, also after they left the feed."""
    include: tuple[str, ...] = ()
    """Patterns of paths (``/guide/**``, ``*.html``); empty: everything that is not excluded."""
    exclude: tuple[str, ...] = ()
    """Patterns of paths that are not read."""
    trust_lastmod: bool = True
    """Whether a page counts as unchanged as long as its ``lastmod`` in the sitemap is the same. Otherwise, and where
    there is none, each listing requests every page, conditionally."""
    authorization: SecretStr | None = None
    """The value of the Authorization header, for a site that needs one."""
    user_agent: str = "penstock"
    """The name that robots.txt is read for, and that requests carry."""
    requests_per_second: float = Field(5.0, gt=0, le=100)
    """A longer ``Crawl-delay`` in robots.txt has precedence, up to 30 seconds."""
    max_pages: int = Field(50_000, ge=1, le=1_000_000)
    """More pages in sitemaps and feeds are an error."""
    max_file_bytes: int = Field(50_000_000, ge=1)
    """Largest page or file that is read, in bytes."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http") or not parts.hostname or parts.username or parts.query:
            raise ValueError("write the address of the site, such as https://docs.example.com")
        return url.rstrip("/")

    @field_validator("user_agent")
    @classmethod
    def _fits_a_header(cls, name: str) -> str:
        if not name.isascii() or not name.isprintable() or not name.strip():
            raise ValueError("write printable ASCII")
        return name

    @property
    def may_be_private(self) -> bool:
        """Whether the address may lead to this machine or a private network: nobody but an operator decides that."""
        parts = urlsplit(self.url)
        return self.allow_private or parts.scheme == "https" or _is_fixed(parts.hostname or "")

    def selects(self, path: str) -> bool:
        return selects(path.strip("/") or "index", self.include, self.exclude)


def _is_fixed(host: str) -> bool:
    """Return whether a host is an address itself, or this machine: no name server decides where it leads."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
