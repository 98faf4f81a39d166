"""The fake chat model as a judge: the last message holds a JSON object, and it answers one."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.fakes.chat_reader import words

ENOUGH = 0.6
"""Share of a statement's words that its context must have."""


def judge(messages: list[dict[str, str]]) -> dict[str, Any]:
    """By the fields of the object that it finds: ``statements`` and ``context`` (a text or a list) → ``verdicts`` of 0
    or 1 for each statement; ``question`` and ``contexts`` → ``verdicts`` for each context; ``answer`` alone →
    ``statements``, its sentences, and ``questions`` that it answers. Nothing that it knows: {}."""
    request = _object(messages[-1]["content"])
    if "statements" in request:
        context = request.get("context", request.get("contexts", ""))
        text = " ".join(context) if isinstance(context, list) else str(context)
        return {
            "verdicts": [{"statement": s, "verdict": int(_share(s, text) >= ENOUGH)} for s in request["statements"]],
        }
    if "contexts" in request:
        about = f"{request.get('question', '')} {request.get('reference', request.get('answer', ''))}"
        return {"verdicts": [{"verdict": int(_share(about, c) >= 0.3)} for c in request["contexts"]]}
    if "answer" in request:
        plain = re.sub(r"\s*\[\d+\]", "", request["answer"])
        sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+", plain) if s.strip()]
        return {"statements": sentences, "questions": [str(request.get("question", plain))]}
    return {}


def _object(text: str) -> dict[str, Any]:
    """The first JSON object in a text."""
    for start in re.finditer(r"\{", text):
        try:
            parsed, _ = json.JSONDecoder().raw_decode(text, start.start())
        except json.JSONDecodeError:
            continue
        if isinstance(parsed, dict):
            return parsed
    return {}


def _share(statement: str, text: str) -> float:
    expected = words(statement)
    return len(expected & words(text)) / len(expected) if expected else 1.0
