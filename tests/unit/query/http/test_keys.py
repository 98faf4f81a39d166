"""The file of services' keys, and what development mode believes."""

from __future__ import annotations

import errno
import getpass
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console
from starlette.datastructures import Headers

from cli.stack import print_page
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured
from pipeline.runtime.home import DEVELOPMENT_FILE, development_token, made_development_token
from query.auth.api_keys import KeyFile, parse
from query.auth.authenticator import Authenticator, open_authenticator, require
from query.auth.identity import Identity
from query.problems import Problem
from query.settings import AuthSettings, ServeSettings
from tests.support.deploy.deploy_kit import ROOT
from tests.support.query.http_kit import write_keys

HASH = sha256(b"secret").hexdigest()
ENDS = f"expires = {(datetime.now(UTC) + timedelta(days=1)).date()}\n"


def identify(keys: KeyFile, key: str) -> Identity | None:
    match = keys.entry(key)
    return None if match is None else match[1].identity(match[0])


def test_an_api_key_identifies_its_service_tenant_and_principal(tmp_path: Path) -> None:
    path = write_keys(
        tmp_path / "keys.toml",
        bot={"key": "one", "tenant": "acme", "tags": ["wiki/staff", "crew"], "class": "extended"},
        person={"key": "two", "tenant": "globex", "principal": "ann@globex"},
        watcher={"key": "three", "tenant": "acme", "operator": True},
    )
    keys = KeyFile(path)
    assert identify(keys, "one") == Identity("key", "acme", None, ("wiki/staff", "crew"), "extended", key="bot")
    assert identify(keys, "two") == Identity("key", "globex", "ann@globex", key="person")
    assert identify(keys, "three") == Identity("key", "acme", None, operator=True, key="watcher")
    for wrong in ("", "One", "one ", HASH, "\udcff", "é"):
        assert identify(keys, wrong) is None


@pytest.mark.parametrize("key", ["one", "a.b.c"])
async def test_a_key_that_is_still_in_the_file_is_in_force_however_it_is_sent(tmp_path: Path, key: str) -> None:
    """Without an issuer of tokens, a bearer key with two dots was taken for a token on the second look, and its request
    ended after four seconds."""
    path = write_keys(tmp_path / "keys.toml", bot={"key": key, "tenant": "acme", "tags": ["x"]})
    authenticator = Authenticator(AuthSettings(), keys=None, key_file=KeyFile(path), development=None)
    for sent in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key} "}, {"x-api-key": key}):
        headers = Headers(sent)
        assert authenticator.is_in_force(headers, await authenticator.authenticate(headers))


async def test_a_request_with_two_credentials_is_refused(tmp_path: Path) -> None:
    """The proxy in front of the service may have looked at the other one."""
    path = write_keys(tmp_path / "keys.toml", bot={"key": "one", "tenant": "acme", "tags": ["x"]})
    authenticator = Authenticator(AuthSettings(), keys=None, key_file=KeyFile(path), development=None)
    bearer, key = (b"authorization", b"Bearer one"), (b"x-api-key", b"one")
    for raw in ([bearer], [key]):
        assert (await authenticator.authenticate(Headers(raw=raw))).key == "bot"
    for raw in ([bearer, bearer], [key, key], [bearer, (b"authorization", b"Bearer two")], [bearer, key]):
        with pytest.raises(Problem):
            await authenticator.authenticate(Headers(raw=raw))


def test_a_removed_api_key_is_rejected_at_the_next_request(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", bot={"key": "one", "tenant": "acme", "tags": ["x"]})
    keys = KeyFile(path)
    assert identify(keys, "one") is not None
    write_keys(path, other={"key": "two", "tenant": "acme", "tags": ["x"]})
    assert identify(keys, "one") is None
    assert identify(keys, "two") is not None


def test_an_expired_api_key_is_rejected(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    keys = KeyFile(
        write_keys(
            tmp_path / "keys.toml",
            old={"key": "one", "tenant": "acme", "tags": ["x"], "expires": now - timedelta(seconds=1)},
            new={"key": "two", "tenant": "acme", "tags": ["x"], "expires": now + timedelta(hours=1)},
        )
    )
    assert identify(keys, "one") is None
    assert identify(keys, "two") == Identity("key", "acme", None, ("x",), key="new")
    assert keys.next_expiry == pytest.approx((now + timedelta(hours=1)).timestamp())


def test_an_unreadable_key_file_rejects_every_key(tmp_path: Path) -> None:
    """It is unknown which keys were removed."""
    path = write_keys(tmp_path / "keys.toml", bot={"key": "one", "tenant": "acme", "tags": ["x"]})
    good = path.read_text()
    keys = KeyFile(path)
    for broken in ("[bot", '[bot]\nsha256 = "short"', "\0"):
        path.write_text(broken)
        with pytest.raises(Misconfigured):
            identify(keys, "one")
    path.write_text(good)
    assert identify(keys, "one") is not None
    os.remove(path)
    with pytest.raises(Misconfigured):
        identify(keys, "one")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (f'{ENDS}tenant = "a"\ntags = ["x"]', "bot: .*sha256"),
        (f'sha256 = "{HASH}"\ntenant = "a"\ntags = ["x"]', "bot: .*expires"),
        (f'expires = 2200-01-01\nsha256 = "{HASH}"\ntenant = "a"\ntags = ["x"]', "bot.expires: .*400 days"),
        (f'expires = 2026-01-01T00:00:00\nsha256 = "{HASH}"\ntenant = "a"\ntags = ["x"]', "bot.expires: .*timezone"),
        (f'{ENDS}sha256 = "{HASH}"\ntags = ["x"]', "bot.tenant"),
        (f'{ENDS}sha256 = "{HASH.upper()}"\ntenant = "a"\ntags = ["x"]', "bot.sha256"),
        (f'{ENDS}sha256 = "{HASH}"\ntenant = "a"', "can read nothing"),
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
def test_a_wrong_key_entry_is_named_without_its_hash(entry: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        parse(f"[bot]\n{entry}\n")
    assert HASH not in str(error.value).lower()


# Development mode


def development(**headers: str) -> Headers:
    return Headers({name.replace("_", "-"): value for name, value in headers.items()})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / DEVELOPMENT_FILE
    made_development_token(file)
    return file


async def test_in_development_mode_a_caller_with_the_token_may_name_any_principal(file: Path) -> None:
    authenticator = Authenticator(AuthSettings(), keys=None, key_file=None, development=file)
    proof = {"authorization": f"Bearer {development_token(file)}"}
    me = await authenticator.authenticate(development(**proof))
    assert (me.principal, me.tenant, me.operator) == (getpass.getuser(), "default", True)
    ann = await authenticator.authenticate(development(x_penstock_as="ann", x_penstock_tenant="acme", **proof))
    assert (ann.principal, ann.tenant, ann.operator) == ("ann", "acme", False)
    for strange in (
        {},
        {"x_penstock_as": "ann"},
        {"authorization": "Bearer something"},
        {"authorization": f"Bearer {development_token(file)[:-1]}"},
        {"x_api_key": "something", "x_penstock_as": "ann"},
        {"x_api_key": "schlüssel".encode().decode("latin-1")},
    ):
        with pytest.raises(Problem, match="development-token") as refused:
            await authenticator.authenticate(development(**strange))
        assert refused.value.status == 401
    for proxy in ("x_forwarded_for", "forwarded", "via", "x_forwarded_host", "x_forwarded_proto"):
        with pytest.raises(Problem) as refused:
            await authenticator.authenticate(development(**proof, **{proxy: "10.0.0.1"}))
        assert refused.value.status == 403


def test_documented_commands_send_the_development_token_only_to_the_services_own_port() -> None:
    """``localhost:8080`` may be anybody's: the service is at 127.0.0.1, at a port that is chosen when it starts."""
    guides = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    sent = [to for guide in guides for to in re.findall(r"-H @\S*development-token (\S+)", guide.read_text())]
    assert len(sent) > 5
    assert [to for to in sent if not to.startswith("http://127.0.0.1:PORT/")] == []


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_address_with_the_development_token_is_printed_only_on_a_terminal(is_terminal: bool) -> None:
    """A click would put it on the browser's command line."""
    shown = StringIO()
    stack = SimpleNamespace(page=lambda: "http://127.0.0.1:1/#token=secret")
    print_page(Console(file=shown, force_terminal=is_terminal, highlight=False), cast(Stack, stack))
    expected = "Copy into your browser: http://127.0.0.1:1/#token=secret\n" if is_terminal else ""
    assert shown.getvalue() == expected


async def test_a_replaced_or_deleted_development_token_is_rejected(file: Path) -> None:
    authenticator = Authenticator(AuthSettings(), keys=None, key_file=None, development=file)
    old = development(authorization=f"Bearer {development_token(file)}")
    file.unlink()
    with pytest.raises(Problem):
        await authenticator.authenticate(old)
    made_development_token(file)
    with pytest.raises(Problem):
        await authenticator.authenticate(old)
    assert await authenticator.authenticate(development(authorization=f"Bearer {development_token(file)}"))


async def test_a_removed_development_token_is_created_anew_at_the_next_start(file: Path) -> None:
    old = development_token(file)
    file.unlink()
    settings = ServeSettings(development=True, development_token_file=file)
    async with open_authenticator(AuthSettings(), settings) as authenticator:
        new = development_token(file)
        assert (new == old, file.stat().st_mode & 0o777) == (False, 0o600)
        assert await authenticator.authenticate(development(authorization=f"Bearer {new}"))
        with pytest.raises(Problem):
            await authenticator.authenticate(development(authorization=f"Bearer {old}"))


def test_the_development_token_file_is_private_and_created_once(file: Path) -> None:
    made = file.read_text()
    assert (file.stat().st_mode & 0o777, len(development_token(file))) == (0o600, 43)
    made_development_token(file)
    assert (file.read_text(), [entry.name for entry in file.parent.iterdir()]) == (made, [file.name])
    assert made == f"Authorization: Bearer {development_token(file)}\n"  # for curl -H @FILE


def test_the_development_token_file_is_created_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    file = tmp_path / DEVELOPMENT_FILE
    made_development_token(file)
    test_the_development_token_file_is_private_and_created_once(file)


def _readable_by_group(file: Path) -> None:
    file.chmod(0o640)


def _symbolic_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def _empty(file: Path) -> None:
    file.write_text("Authorization: Bearer \n")


def _owned_by_another_user(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(file, 65534, 65534)


@pytest.mark.parametrize("spoil", [_readable_by_group, _symbolic_link, _empty, _owned_by_another_user])
async def test_a_development_token_file_others_may_have_read_or_written_is_rejected(
    file: Path, spoil: Callable[[Path], None]
) -> None:
    authenticator = Authenticator(AuthSettings(), keys=None, key_file=None, development=file)
    proof = development(authorization=f"Bearer {development_token(file)}")
    spoil(file)
    with pytest.raises(Misconfigured, match="development-token"):
        await authenticator.authenticate(proof)
    settings = ServeSettings(development=True, development_token_file=file)
    with pytest.raises(Misconfigured, match="development-token"):
        async with open_authenticator(AuthSettings(), settings):
            pass


async def test_outside_development_mode_headers_naming_a_principal_are_ignored(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.toml", bot={"key": "one", "tenant": "acme", "tags": ["x"]})
    authenticator = Authenticator(AuthSettings(), keys=None, key_file=KeyFile(path), development=None)
    named = {"x_penstock_as": "ann", "x_penstock_tenant": "globex"}
    for headers in (named, {"authorization": "Basic b25l"}, {"authorization": "Bearer "}, {"authorization": "one"}):
        with pytest.raises(Problem) as refused:
            await authenticator.authenticate(development(**headers))
        assert (refused.value.status, refused.value.headers["WWW-Authenticate"][:6]) == (401, "Bearer")
    for headers in ({"authorization": "Bearer one"}, {"authorization": "bearer  one"}, {"x_api_key": "one"}):
        identity = await authenticator.authenticate(development(**headers, **named))
        assert (identity.key, identity.tenant, identity.principal) == ("bot", "acme", None)
    with pytest.raises(Problem):
        await authenticator.authenticate(development(authorization="Bearer one", x_api_key="one"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "penstock.example.org", ""])
def test_development_mode_refuses_to_listen_beyond_loopback(host: str) -> None:
    with pytest.raises(Misconfigured, match="loopback only"):
        require(AuthSettings(), ServeSettings(host=host, development=True))


def test_a_service_without_authentication_does_not_start() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        require(AuthSettings(), ServeSettings(host=host, development=True))
    with pytest.raises(Misconfigured, match="no authentication is configured"):
        require(AuthSettings(), ServeSettings())
