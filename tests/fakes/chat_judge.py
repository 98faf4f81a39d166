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
    asked = _object(messages[-1]["content"])
    if "statements" in asked:
        context = asked.get("context", asked.get("contexts", ""))
        text = " ".join(context) if isinstance(context, list) else str(context)
        return {
            "verdicts": [{"statement": s, "verdict": int(_share(s, text) >= ENOUGH)} for s in asked["statements"]],
        }
    if "contexts" in asked:
        about = f"{asked.get('question', '')} {asked.get('reference', asked.get('answer', ''))}"
        return {"verdicts": [{"verdict": int(_share(about, c) >= 0.3)} for c in asked["contexts"]]}
    if "answer" in asked:
        plain = re.sub(r"\s*\[\d+\]", "", asked["answer"])
        sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+", plain) if s.strip()]
        return {"statements": sentences, "questions": [str(asked.get("question", plain))]}
    return {}


def _object(text: str) -> dict[str, Any]:
    """The first JSON object in a text."""
    for start in re.finditer(r"\{", text):
        try:
            found, _ = json.JSONDecoder().raw_decode(text, start.start())
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def _share(statement: str, text: str) -> float:
    wanted = words(statement)
    return len(wanted & words(text)) / len(wanted) if wanted else 1.0
