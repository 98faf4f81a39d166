"""connectors.toml: what it may say, and the one line that tells what is wrong with it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, ConfigDict, SecretStr

from connectors.declared import BUILT_IN, Key, load, source_class
from connectors.http import tenant_for
from connectors.source import Context
from pipeline.core.errors import Misconfigured
from tests.support.space import KEY_ENDS

KIND = f"{__name__}:Tickets"


class Proxy(BaseModel):
    model_config = ConfigDict(extra="forbid")
    host: str
    password: SecretStr | None = None


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    url: str
    token: SecretStr
    proxy: Proxy | None = None


class Tickets:
    Options = Options

    def __init__(self, options: Options, context: Context) -> None:
        self.options = options

    async def slim(self) -> None: ...


def declare(folder: Path, text: str) -> Path:
    path = folder / "connectors.toml"
    path.write_text(text.replace("KIND", KIND))
    return path


def made(path: Path, name: str = "help-desk", **environ: str) -> Tickets:
    context = Context(name=name, tenant="t", memory=None, folder=path.parent)  # type: ignore[arg-type]
    source = load(path, environ).plan(name).make(context)
    assert isinstance(source, Tickets)
    return source


def test_declarations_of_another_user_in_the_current_folder_are_used_only_if_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say which code runs, and who may read what; many people may write to the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_CONNECTORS_FILE", raising=False)
    path = declare(tmp_path, '[connector.help-desk]\nkind = "KIND"')
    assert "help-desk" in load().plans
    if os.geteuid() == 0:
        os.chown(path, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    with pytest.raises(Misconfigured, match="belongs to another user"):
        load()
    assert "help-desk" in load(path).plans
    monkeypatch.setenv("PENSTOCK_CONNECTORS_FILE", "connectors.toml")
    assert "help-desk" in load().plans


def test_secrets_are_read_from_environment_variables(tmp_path: Path) -> None:
    path = declare(tmp_path, '[connector.help-desk]\nkind = "KIND"\nurl = "https://x"\nproxy = { host = "p" }')
    options = made(path, PENSTOCK_HELP_DESK_TOKEN="a", PENSTOCK_HELP_DESK_PROXY_PASSWORD="b").options
    assert options.token.get_secret_value() == "a"  # type: ignore[attr-defined]
    assert options.proxy is not None  # type: ignore[attr-defined]
    assert options.proxy.password == SecretStr("b")  # type: ignore[attr-defined]
    named = declare(tmp_path, '[connector.help-desk]\nkind = "KIND"\nurl = { env = "U" }\ntoken = { env = "T" }')
    assert made(named, T="c", U="https://y").options.token.get_secret_value() == "c"  # type: ignore[attr-defined]
    assert made(named, T="c", U="https://y").options.url == "https://y"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[connector.a]\nkind = "KIND"\ntoken = "hunter2"\nurl = "x"',
            r"\[connector\.a\] token: a secret does not belong in a file: set PENSTOCK_A_TOKEN",
        ),
        ('[connector.a]\nkind = "KIND"\nurl = "x"', r"\[connector\.a\] token: set PENSTOCK_A_TOKEN in the environment"),
        ('[connector.a]\nkind = "KIND"\nurl = "x"\ntoken = { env = "NOT_SET" }', "no variable NOT_SET"),
        (
            '[connector.a]\nkind = "KIND"\nurl = "x"\ntoken = { env = "T" }\nproxy = { host = "h", password = "p" }',
            "proxy: password: a secret",
        ),
        ('[connector.a]\nkind = "KIND"\nurl = "x"\ntokn = 1\ntoken = { env = "T" }', "tokn: no such option"),
        ('[connector.a]\nkind = "KIND"\ntoken = { env = "T" }', "url: Field required"),
        ('[connector.a]\nkind = "mail"', "kind 'mail': one of airbyte, confluence, database"),
        ('[connector.a]\nkind = "nowhere.at_all:Thing"', "nowhere.at_all cannot be imported"),
        (f'[connector.a]\nkind = "{__name__}:Options"', "no class Options that implements a source"),
    ],
)
def test_an_invalid_connector_table_does_not_affect_other_connectors(tmp_path: Path, text: str, said: str) -> None:
    path = declare(tmp_path, text + '\n[connector.b]\nkind = "KIND"\nurl = "x"\ntoken = { env = "T" }')
    with pytest.raises(Misconfigured, match=said) as caught:
        made(path, "a", T="t")
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert made(path, "b", T="t").options.url == "x"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[connector.a", r"connectors\.toml: is not valid TOML at"),
        ("[connectors.a]", r"unknown table \[connectors\]"),
        ("[connector]\na = 1", r"write one table \[connector\.NAME\]"),
        ("[connector.a]", r"\[connector\.a\] kind: Field required"),
        ('[connector.a]\nkind = "git"\npoll_seconds = 0', r"\[connector\.a\] poll_seconds: Input should be greater"),
        ('[connector.a]\nkind = "git"\ntenant = "x/y"', r"\[connector\.a\] tenant:"),
        ('[connector."a/b"]\nkind = "git"', "none of them a /"),
        ('[connector.folder]\nkind = "git"', "penstock ingest"),
        ('[connector.a-b]\nkind = "git"\n[connector.a_b]\nkind = "git"', "would share PENSTOCK_A_B_"),
        ('[key.x]\nsha256 = "abc"\ntenant = "t"\nmay = []', r"\[key\.x\] sha256:"),
        (f'[key.x]\nsha256 = "{"0" * 64}"\ntenant = "t"\nmay = []', r"\[key\.x\] expires: Field required"),
        ('[key.x]\nsecret = "abc"', r"\[key\.x\] sha256: Field required"),
        (f'[key.x]\nsha256 = "{"0" * 64}"\nexpires = {KEY_ENDS}\ntenant = "t"\nmay = ["all"]', r"\[key\.x\] may"),
    ],
)
def test_an_invalid_connectors_file_is_refused_with_a_one_line_reason(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=said) as caught:
        load(declare(tmp_path, text), {})
    assert "\n" not in str(caught.value)


def test_a_missing_connectors_file_is_reported_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="the file does not exist; declare connectors"):
        load(tmp_path / "none.toml", {})


def test_an_unknown_connector_name_is_reported_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"no connector 'b' \(known: a\)"):
        load(declare(tmp_path, '[connector.a]\nkind = "git"'), {}).plan("b")


@pytest.mark.parametrize("kind", sorted(BUILT_IN))
def test_every_built_in_kind_can_be_imported_and_forbids_unknown_options(kind: str) -> None:
    options = source_class(kind).Options
    assert options.model_config.get("extra") == "forbid"


def test_a_key_permits_only_its_own_actions() -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    other = hashlib.sha256(b"other").hexdigest()
    keys = {
        "intranet": Key(sha256=digest, expires=KEY_ENDS, tenant="acme", may=frozenset({"uploads"})),
        "chat": Key(sha256=other, expires=KEY_ENDS, tenant="acme", may=frozenset({"conversations"})),
    }
    app = FastAPI()

    @app.get("/")
    def whose(tenant: str = Depends(tenant_for("uploads", keys))) -> str:
        return tenant

    client = TestClient(app)
    answers = {
        given: client.get("/", headers={"Authorization": given} if given else {}).status_code
        for given in ("", "Bearer wrong", "Bearer ", "Basic right", "Bearer other", "bearer right")
    }
    assert answers == {
        "": 401,
        "Bearer wrong": 401,
        "Bearer ": 401,
        "Basic right": 401,
        "Bearer other": 403,
        "bearer right": 200,
    }
    assert client.get("/", headers={"Authorization": "Bearer right"}).json() == "acme"
