"""Choosing a chat model by the settings."""

from __future__ import annotations

import pytest

from pipeline.core.errors import Misconfigured
from query.answers import chat
from query.settings import ChatSettings


def test_without_a_chat_server_no_client_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "is_installed", lambda name: False)
    assert chat.by_settings(ChatSettings()) is None


def test_a_configured_chat_server_without_its_client_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat, "is_installed", lambda name: False)
    with pytest.raises(Misconfigured, match=r"pip install 'penstock\[chat\]'"):
        chat.by_settings(ChatSettings(base_url="http://127.0.0.1:9/v1", model="small"))
