"""Markdown renderers of chat programs load nothing in an answer, and link only to its sources."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from random import Random

import pytest

from tests.unit.query.answers.test_written import ACTIVE, CODE_PIECES, PASSAGE_ADDRESS, PIECES, SOURCE, shown

RENDERERS = Path(__file__).parents[3] / "renderers"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("npm"), reason="needs Node.js: the renderers are JavaScript"),
]
PIECES_OF_NAMES = [
    *(
        "e.example",
        "evil.com",
        "secret.evil.co.uk/?q=",
        "e@evil.com",
        "//evil.com",
        "https:",
        "//docs.example/x",
        "'secret",
        "e@evil.com?www&#46;evil&#46;com",
        "&#46;",
        "&commat;",
        "&amp;",
    ),
    *(
        "\\.",
        "\\@",
        "$",
        "$$",
        "~~",
        "**",
        "\u00a0",
        "\u200b",
        "\u3000",
        "\u8bf7",
        "\u00e9",
        ".",
        ".com",
        ".a" * 20,
        "@",
        "?",
        "#",
        ";",
        "+",
    ),
    *("[^1]", "[^1]: ", "[a]: ", "data:text/html,x", "javascript:", "www", "&Tab;", "{", "}", "\u2028", "\x0c", "\x00"),
]
"""Parts of addresses, and what renderers read before they look for addresses."""


def effects(texts: list[str]) -> list[list[tuple[str, str]]]:
    """Return, for each text, pairs of a renderer and what it would make a browser load, run or link to."""
    if not (RENDERERS / "node_modules").is_dir():
        pytest.fail("run `make test-programs` first: it installs the renderers")
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    run = subprocess.run(
        ["node", "render.mjs"], cwd=RENDERERS, input=lines, capture_output=True, text=True, check=True, timeout=280
    )
    return [[(name, effect) for name, effect in json.loads(line)] for line in run.stdout.splitlines()]


def is_of_source(address: str) -> bool:
    """Whether an address leads to the host of the only source, or to a place within the answer."""
    return address.startswith((SOURCE.removesuffix("a"), "#"))


def test_the_renderers_act_on_text_that_is_not_sanitised() -> None:
    """This shows that the test below can fail."""
    by_text = effects([*ACTIVE, "evil.com", "e@evil.com"])
    assert sum(any(not is_of_source(effect) for _, effect in pairs) for pairs in by_text) >= 35
    assert len({name for pairs in by_text for name, _ in pairs}) == 10


def test_answers_lead_to_no_foreign_host_in_any_renderer() -> None:
    random = Random()
    seed = random.randrange(2**32)
    random.seed(seed)
    pieces = [*PIECES, *CODE_PIECES, *PIECES_OF_NAMES, *ACTIVE]
    texts = [*ACTIVE]
    for _ in range(3_000):
        few = random.sample(pieces, random.randint(4, 14)) if random.random() < 0.6 else pieces
        texts.append("".join(random.choices(few, k=random.randint(1, 20))))
    for text, pairs in zip(texts, effects([shown(text) for text in texts]), strict=True):
        foreign = [
            (name, effect)
            for name, effect in pairs
            # Within a formula a code span is none: an address that a passage contains becomes a link.
            if not (is_of_source(effect) or ("formulas" in name and effect.startswith(PASSAGE_ADDRESS)))
        ]
        assert not foreign, f"seed {seed}: {text!r} is shown as {shown(text)!r}"
