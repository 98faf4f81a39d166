"""When a token is renewed, and which forms of it are understood."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import httpx
import jwt
import pytest

from penstock.client import TokenUnavailable
from penstock.client.token import BearerToken, expiry
from pipeline.runtime.home import development_token, made_development_token


def token(seconds: float) -> str:
    """Valid for so many seconds."""
    return jwt.encode({"exp": int(time.time() + seconds), "sub": str(seconds)}, "k" * 32)


def sent(auth: BearerToken, *statuses: int) -> list[str]:
    """The tokens of the requests that are sent while the service responds with these statuses."""
    flow = auth.sync_auth_flow(httpx.Request("GET", "http://x"))
    requests = [next(flow).headers["Authorization"].removeprefix("Bearer ")]
    for status in statuses:
        try:
            requests.append(flow.send(httpx.Response(status)).headers["Authorization"].removeprefix("Bearer "))
        except StopIteration:
            break
    return requests


def test_the_expiry_of_a_token_is_read_and_of_anything_else_unknown() -> None:
    at = int(time.time()) + 100
    assert expiry(jwt.encode({"exp": at}, "k" * 32)) == at
    others = ("", "opaque", "a.b.c", "..", jwt.encode({"sub": "x"}, "k" * 32), "é.é.é")
    deep = base64.urlsafe_b64encode(b"[" * 50_000).decode()
    for other in (*others, jwt.encode({"exp": 10**400}, "k" * 32), f"a.{deep}.c"):
        assert expiry(other) is None


def test_a_token_is_used_until_shortly_before_it_expires() -> None:
    tokens = iter([token(600), token(601)])
    auth = BearerToken(lambda: next(tokens))
    assert sent(auth, 200) == sent(auth, 200)
    short = iter([token(30), token(31), token(600)])
    auth = BearerToken(lambda: next(short))
    assert len({sent(auth, 200)[0] for _ in range(3)}) == 3
    assert len({sent(auth, 200)[0] for _ in range(3)}) == 1


def test_after_a_401_the_token_is_renewed_and_the_request_sent_once_more() -> None:
    tokens = iter(["one", "two", "three"])
    auth = BearerToken(lambda: next(tokens))
    assert sent(auth, 401, 401) == ["one", "two"]
    assert sent(auth, 200) == ["two"]


def test_a_token_that_cannot_be_renewed_is_not_sent_again() -> None:
    assert sent(BearerToken("fixed"), 401) == ["fixed"]
    assert sent(BearerToken(lambda: "same"), 401) == ["same"]


def test_a_file_may_hold_a_token_or_a_header_line(tmp_path: Path) -> None:
    bare, line = tmp_path / "bare", tmp_path / "line"
    bare.write_text("abc\n")
    made_development_token(line)
    assert sent(BearerToken(bare), 200) == ["abc"]
    assert sent(BearerToken(line), 200) == [development_token(line)]


def test_a_file_that_changed_is_read_again_after_a_401(tmp_path: Path) -> None:
    """`penstock up` makes another token whenever it starts the service."""
    file = tmp_path / "token"
    file.write_text("old")
    auth = BearerToken(file)
    assert sent(auth, 200) == ["old"]
    file.write_text("new")
    assert sent(auth, 401, 200) == ["old", "new"]


@pytest.mark.parametrize("content", [None, "", "\n", b"\xff\xfe"])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenUnavailable, match=str(file)):
        sent(BearerToken(file), 200)


def test_an_asynchronous_function_with_the_blocking_client_is_named() -> None:
    async def renew() -> str:
        return "x"

    auth = BearerToken(renew)
    with pytest.raises(TypeError, match="use AsyncClient"):
        sent(auth, 200)


def test_a_token_that_is_the_name_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    """The service called it an unknown or expired token."""
    file = tmp_path / "token"
    file.write_text("abc")
    with pytest.raises(ValueError, match=r"pathlib\.Path"):
        BearerToken(str(file))


@pytest.mark.parametrize("bad", ["secret\nX-Other: 1", "secret\r\n", "secret\x00", "sécret", "two secret", ""])
async def test_a_token_that_cannot_be_sent_is_refused_without_being_quoted(bad: str) -> None:
    for auth in (BearerToken(bad), BearerToken(lambda: bad)):
        with pytest.raises(TokenUnavailable) as raised:
            sent(auth)
        flow = auth.async_auth_flow(httpx.Request("GET", "http://x"))
        with pytest.raises(TokenUnavailable):
            await anext(flow)
        assert "cret" not in str(raised.value)
