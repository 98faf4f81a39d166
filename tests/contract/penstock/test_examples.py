"""The example programs for clients, as processes of their own, on the real service."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from query.auth.authenticator import local_user
from query.settings import ChatSettings
from tests.contract.penstock.conftest import QueryService
from tests.support.query.http_kit import TOKEN_FILE, service_over, write_keys
from tests.support.space import PROJECT

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="session")]

QUESTION = "When does the harbour open?"
HARBOUR = "Rules › Harbour (https://wiki.example/harbour.md)"


async def output(*command: str, at: Path = PROJECT, lines: str | None = None) -> str:
    """Run a program with these lines on stdin, which must succeed and write nothing on stderr. Returns its output."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=at, env=environment, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate((lines or "").encode()), 120)
    assert (process.returncode, err.decode()) == (0, "")
    return out.decode()


async def run(service: QueryService, name: str, *arguments: str) -> str:
    return await output(sys.executable, f"examples/{name}", service.url, str(TOKEN_FILE), *arguments)


async def test_the_blocking_example_searches_and_asks(service: QueryService) -> None:
    lines = (await run(service, "ask.py", QUESTION)).splitlines()
    assert lines[0].endswith(HARBOUR)
    assert any(re.fullmatch(r"The harbour opens at nine\. \[\d]", line) for line in lines)
    assert any(re.fullmatch(r"\[\d] Rules, https://wiki\.example/harbour\.md", line) for line in lines)
    assert lines[-2].startswith("searchable: True, because ")
    assert lines[-1].startswith("not-found: ")


async def test_the_asynchronous_example_searches_many_times_at_once(service: QueryService) -> None:
    lines = (await run(service, "ask_async.py", "harbour opens", "crane licence")).splitlines()
    assert lines[0].endswith(" may read documents of wiki")
    assert lines[1] == f"harbour opens → {HARBOUR}"
    assert lines[2].startswith("crane licence → Rules › Crane (")


async def test_the_example_of_langchain_fills_a_prompt(service: QueryService) -> None:
    text = await run(service, "ask_langchain.py", QUESTION)
    assert f"[1] {HARBOUR}\n" in text
    assert "The harbour opens at nine." in text
    assert text.rstrip().endswith(f"Human: {QUESTION}")


async def test_the_example_of_llamaindex_asks_and_reads(service: QueryService) -> None:
    text = await run(service, "ask_llamaindex.py", QUESTION)
    assert "The harbour opens at nine." in text
    assert f"  {HARBOUR}\n" in text
    assert text.splitlines()[-1].startswith("Rules: ")


async def test_the_example_of_a_chat_bot_answers_each_person_from_their_documents(
    service: QueryService, tmp_path: Path
) -> None:
    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    signing_key, key_file = tmp_path / "signing.pem", tmp_path / "key"
    signing_key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    key_file.write_text("bot-key")
    keys = write_keys(tmp_path / "keys.toml", **{"chat-bot": {"key": "bot-key", "tenant": "default"}})
    keys.write_text(f"{keys.read_text()}[chat-bot.acts_for]\nissuer = 'chat-bot'\npublic_key = '''{public}'''\n")
    messages = f"{local_user()}\t{QUESTION}\nstranger@acme.example\t{QUESTION}\n"
    chat = ChatSettings(base_url=service.chat.url, model=service.chat.model, timeout_seconds=30)
    async with service_over(service.library, auth={"keys_file": keys}, chat=chat) as (client, _):
        address = str(client.base_url).rstrip("/")
        command = (sys.executable, "examples/chat_bot.py", address, str(key_file), str(signing_key))
        text = await output(*command, lines=messages)
    mine, other = text.split("stranger@acme.example: ")
    assert re.match(rf"{local_user()}: The harbour opens at nine\. \[\d]", mine)
    assert "Rules, https://wiki.example/harbour.md" in mine
    assert "nine" not in other
