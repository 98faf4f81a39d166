"""Addresses that a source's client may request: every form in which a private address can be written is refused."""

from __future__ import annotations

from datetime import UTC, datetime

import httpx
import pytest

from connectors.errors import Forbidden
from connectors.web.limits import budget_pause
from connectors.web.transport import Hosts, is_public
from pipeline.core.errors import Misconfigured

NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.255.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.7",
        "203.0.113.9",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "192.88.99.1",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::ffff:a9fe:a9fe",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b::808:808%eth0",
        "64:ff9b:1::1",
        "2002:7f00:1::1",
        "2002:808:808::1",
        "2001::1",
        "2001:db8::1",
        "3fff::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1%eth0",
        "fec0::1",
        "ff02::1",
        "100::1",
        "5f00::1",
        "localhost",
        "",
        "0x7f000001",
        "2130706433",
        "127.1",
    ],
)
def test_private_reserved_and_malformed_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "8.8.8.8",
        "104.192.141.1",
        "172.15.0.1",
        "172.32.0.1",
        "100.63.255.255",
        "100.128.0.1",
        "169.253.1.1",
        "198.17.0.1",
        "223.255.255.255",
        "2606:4700::6810:84e5",
        "2a00:1450:4001::200e",
        "64:ff9b::808:808",
    ],
)
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


def hosts(*also: str, base: str = "https://wiki.example.com/wiki") -> Hosts:
    return Hosts(httpx.URL(base), also)


@pytest.mark.parametrize(
    "url",
    [
        "https://wiki.example.com/x",
        "https://WIKI.example.com:443/",
        "https://files.example.net/a?b",
        "https://a.media.example.org/",
        "https://a.b.media.example.org:443/",
        "https://10.1.1.1:8443/x",
        "https://[::1]:9000/",
    ],
)
def test_the_base_host_and_the_allowed_hosts_are_permitted(url: str) -> None:
    hosts("files.example.net", ".media.example.org", "10.1.1.1:8443", "[::1]:9000").check(httpx.URL(url))


@pytest.mark.parametrize(
    "url",
    [
        "http://wiki.example.com/",
        "https://wiki.example.com:444/",
        "https://wiki.example.com.evil.net/",
        "https://evil.net/",
        "https://evil.net/wiki.example.com",
        "https://wiki.example.com@evil.net/",
        "https://token@wiki.example.com/",
        "https://evil.net\\@wiki.example.com/",
        "https://wiki.example.com./",
        "http://files.example.net/",
        "https://files.example.net:8443/",
        "https://x.files.example.net/",
        "https://media.example.org/",
        "https://evilmedia.example.org/",
        "https://a.media.example.org:8443/",
        "https://10.1.1.1/",
        "https://10.1.1.1:8444/",
        "http://10.1.1.1:8443/",
        "https://localhost/",
        "ftp://wiki.example.com/",
        "file:///etc/passwd",
        "gopher://wiki.example.com:443/",
        "https:///path",
        "/path",
    ],
)
def test_urls_of_other_hosts_schemes_and_ports_are_forbidden(url: str) -> None:
    with pytest.raises(Forbidden):
        hosts("files.example.net", ".media.example.org", "10.1.1.1:8443").check(httpx.URL(url))


def test_http_is_permitted_only_if_the_base_url_is_http() -> None:
    hosts("127.0.0.1:1234", "files.example.net", base="http://wiki.corp:8090").check(httpx.URL("http://127.0.0.1:1234"))
    hosts("files.example.net", base="http://wiki.corp:8090").check(httpx.URL("http://files.example.net/"))


def test_only_the_base_and_hosts_allowed_with_a_port_may_have_private_addresses() -> None:
    ours = hosts("files.example.net", ".example.org", "files.corp:8443")
    ours.check_address("wiki.example.com", 443, "10.0.0.1")
    ours.check_address("files.corp", 8443, "10.0.0.2")
    ours.check_address("files.example.net", 443, "8.8.8.8")
    for host, port in [("files.example.net", 443), ("a.example.org", 443), ("wiki.example.com", 444)]:
        with pytest.raises(Forbidden, match="not public"):
            ours.check_address(host, port, "10.0.0.1")


@pytest.mark.parametrize(
    "entry",
    ["", ".", "..", ".example.com:443", "https://example.com", "a b@c", "user@host", "host/path", "host:x", "h:"],
)
def test_an_allowed_host_that_is_no_host_name_is_misconfigured(entry: str) -> None:
    with pytest.raises(Misconfigured, match="is not a host"):
        hosts(entry)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"X-RateLimit-Remaining": "1", "X-RateLimit-Reset": "2026-11-21T12:05Z"}, None),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2026-11-21T12:05Z"}, 300),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2026-11-21T12:00:30"}, 30),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2026-11-21T14:05:00+02:00"}, 300),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(NOW.timestamp()) + 90)}, 90),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(NOW.timestamp()) - 90)}, 0),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "17"}, 17),
        ({"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "soon"}, 1),
        ({"X-RateLimit-Remaining": "0"}, 1),
        ({"RateLimit-Remaining": "0", "RateLimit-Reset": "5"}, 5),
        ({"X-RateLimit-Remaining": "900", "X-RateLimit-NearLimit": "true"}, 1),
        ({"X-RateLimit-Remaining": "900", "X-RateLimit-NearLimit": "false"}, None),
        ({"X-RateLimit-Remaining": "-1"}, None),
    ],
)
def test_rate_limit_headers_become_a_pause_in_seconds(headers: dict[str, str], seconds: float | None) -> None:
    assert budget_pause(httpx.Headers(headers), now=NOW) == seconds
