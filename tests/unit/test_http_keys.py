"""The file of services' keys, and what development mode believes."""

from __future__ import annotations

import getpass
import os
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from pipeline.core.errors import Misconfigured
from query.http.auth import Authenticator, require
from query.http.keys import KeyFile, parse
from query.http.problems import Problem
from query.http.who import Who
from query.settings import AuthSettings, ServeSettings
from tests.contract.http_kit import write_keys

HASH = sha256(b"secret").hexdigest()
ENDS = f"expires = {(datetime.now(UTC) + timedelta(days=1)).date()}\n"


def test_a_key_says_which_service_asks_and_as_whom(tmp_path: Path) -> None:
    path = write_keys(
        tmp_path / "keys.toml",
        bot={"key": "one", "tenant": "acme", "tags": ["wiki/staff", "crew"], "class": "extended"},
        person={"key": "two", "tenant": "globex", "principal": "ann@globex"},
        watcher={"key": "three", "tenant": "acme", "operator": True},
    )
    keys = KeyFile(path)
    assert keys.who("one") == Who("key", "acme", None, ("wiki/staff", "crew"), "extended", key="bot")
    assert keys.who("two") == Who("key", "globex", "ann@globex", key="person")
    assert keys.who("three") == Who("key", "acme", None, operator=True, key="watcher")
    for wrong in ("", "One", "one ", HASH, "\udcff", "é"):
        assert keys.who(wrong) is None


def test_a_key_that_is_taken_away_is_gone_at_the_next_request(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", bot={"key": "one", "tenant": "acme", "tags": ["x"]})
    keys = KeyFile(path)
    assert keys.who("one") is not None
    write_keys(path, other={"key": "two", "tenant": "acme", "tags": ["x"]})
    assert keys.who("one") is None
    assert keys.who("two") is not None


def test_a_key_opens_nothing_once_it_has_expired(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    keys = KeyFile(
        write_keys(
            tmp_path / "keys.toml",
            old={"key": "one", "tenant": "acme", "tags": ["x"], "expires": now - timedelta(seconds=1)},
            new={"key": "two", "tenant": "acme", "tags": ["x"], "expires": now + timedelta(hours=1)},
        )
    )
    assert keys.who("one") is None
    assert keys.who("two") == Who("key", "acme", None, ("x",), key="new")
    assert keys.next_expiry == pytest.approx((now + timedelta(hours=1)).timestamp())


def test_a_file_that_cannot_be_read_opens_for_nobody(tmp_path: Path) -> None:
    """Which keys it took away is not known."""
    path = write_keys(tmp_path / "keys.toml", bot={"key": "one", "tenant": "acme", "tags": ["x"]})
    good = path.read_text()
    keys = KeyFile(path)
    for broken in ("[bot", '[bot]\nsha256 = "short"', "\0"):
        path.write_text(broken)
        with pytest.raises(Misconfigured):
            keys.who("one")
    path.write_text(good)
    assert keys.who("one") is not None
    os.remove(path)
    with pytest.raises(Misconfigured):
        keys.who("one")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (f'{ENDS}tenant = "a"\ntags = ["x"]', "bot.sha256"),
        (f'sha256 = "{HASH}"\ntenant = "a"\ntags = ["x"]', "bot.expires"),
        (f'expires = 2200-01-01\nsha256 = "{HASH}"\ntenant = "a"\ntags = ["x"]', "bot.expires: .*400 days"),
        (f'expires = 2026-01-01T00:00:00\nsha256 = "{HASH}"\ntenant = "a"\ntags = ["x"]', "bot.expires: .*timezone"),
        (f'{ENDS}sha256 = "{HASH}"\ntags = ["x"]', "bot.tenant"),
        (f'{ENDS}sha256 = "{HASH.upper()}"\ntenant = "a"\ntags = ["x"]', "bot.sha256"),
        (f'{ENDS}sha256 = "{HASH}"\ntenant = "a"', "could read nothing"),
        (f'{ENDS}sha256 = "{HASH}"\ntenant = "a"\ntags = ["x"]\nprincipal = "p"', "not both"),
        (f'{ENDS}sha256 = "{HASH}"\ntenant = "a"\ntags = ["x"]\nclass = "root"', "bot.class"),
        (f'{ENDS}sha256 = "{HASH}"\ntenant = "a"\ntags = ["x"]\nadmin = true', "bot.admin"),
        (
            f'{ENDS}sha256 = "{HASH}"\ntenant = "a"\ntags = ["x"]\n'
            f'[two]\n{ENDS}sha256 = "{HASH}"\ntenant = "b"\ntags = ["x"]',
            "same",
        ),
    ],
)
def test_a_wrong_entry_is_named_and_its_hash_is_not(entry: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        parse(f"[bot]\n{entry}\n")
    assert HASH not in str(error.value).lower()


# Development mode


def development(**headers: str) -> Headers:
    return Headers({name.replace("_", "-"): value for name, value in headers.items()})


async def test_in_development_a_caller_is_whoever_it_says(tmp_path: Path) -> None:
    authenticator = Authenticator(AuthSettings(), keys=None, key_file=None, development=True)
    me = await authenticator.authenticate(development())
    assert (me.principal, me.tenant, me.operator) == (getpass.getuser(), "default", True)
    ann = await authenticator.authenticate(development(x_penstock_as="ann", x_penstock_tenant="acme"))
    assert (ann.principal, ann.tenant, ann.operator) == ("ann", "acme", False)
    for refused in (
        development(authorization="Bearer something"),  # a token is never taken for a name
        development(x_api_key="something"),
        development(x_penstock_as="ann", x_forwarded_for="10.0.0.1"),
        development(forwarded="for=10.0.0.1"),
        development(via="1.1 proxy"),
        development(x_forwarded_host="search.example.org"),
        development(x_forwarded_proto="https"),
    ):
        with pytest.raises(Problem):
            await authenticator.authenticate(refused)


async def test_outside_of_it_names_are_nothing(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", bot={"key": "one", "tenant": "acme", "tags": ["x"]})
    authenticator = Authenticator(AuthSettings(), keys=None, key_file=KeyFile(path), development=False)
    named = {"x_penstock_as": "ann", "x_penstock_tenant": "globex"}
    for headers in (named, {"authorization": "Basic b25l"}, {"authorization": "Bearer "}, {"authorization": "one"}):
        with pytest.raises(Problem) as refused:
            await authenticator.authenticate(development(**headers))
        assert (refused.value.status, refused.value.headers["WWW-Authenticate"][:6]) == (401, "Bearer")
    for headers in ({"authorization": "Bearer one"}, {"authorization": "bearer  one"}, {"x_api_key": "one"}):
        who = await authenticator.authenticate(development(**headers, **named))
        assert (who.key, who.tenant, who.principal) == ("bot", "acme", None)
    with pytest.raises(Problem):
        await authenticator.authenticate(development(authorization="Bearer one", x_api_key="one"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "penstock.example.org", ""])
def test_development_mode_refuses_to_serve_anybody_else(host: str) -> None:
    with pytest.raises(Misconfigured, match="loopback only"):
        require(AuthSettings(), ServeSettings(host=host, development=True))


def test_a_service_that_could_recognise_nobody_does_not_start() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        require(AuthSettings(), ServeSettings(host=host, development=True))
    with pytest.raises(Misconfigured, match="nobody could prove"):
        require(AuthSettings(), ServeSettings())
