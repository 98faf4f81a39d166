"""Imports of a command or a worker before it does anything: its start waits for all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PARSERS = ("bs4", "lxml", "markdown_it", "pypdf", "tree_sitter")
ANSWERS = ("fastapi", "mcp", "openai")
STORES = ("aiokafka", "elasticsearch", "faust", "psycopg")
MODELS = ("ctranslate2", "numpy", "scipy", "tiktoken", "tokenizers")
TRACING = ("opentelemetry.sdk",)
"""Heavy modules that many processes need."""

WORKER = "cli.main, pipeline.runtime.settings, pipeline.observability.metrics, pipeline.stream.worker"
UNNEEDED = {
    "penstock.command, cli.main": (
        *PARSERS,
        *ANSWERS,
        "uvicorn",
        *STORES,
        *MODELS,
        *TRACING,
        "asyncio",
        "pipeline.runtime.settings",
        "query",
        "structlog",
    ),
    "cli.main, cli.search": (
        *PARSERS,
        *ANSWERS,
        "uvicorn",
        *STORES,
        *MODELS,
        *TRACING,
        "asyncio",
        "pipeline.runtime.settings",
        "query",
        "structlog",
    ),
    f"{WORKER}, pipeline.stream.detect_worker": (*PARSERS, *ANSWERS, *MODELS, *TRACING, "elasticsearch"),
    f"{WORKER}, pipeline.stream.keywords_worker": (*PARSERS, *ANSWERS, *MODELS, *TRACING),
    "cli.main, cli.serve, query.http.serve": (
        *PARSERS,
        *TRACING,
        "ctranslate2",
        "dateparser",
        "faust",
        "mcp",
        "openai",
        "scipy",
        "tiktoken",
        "tokenizers",
    ),
    f"{WORKER}, pipeline.stream.vectors_worker": (*PARSERS, *ANSWERS, *TRACING, "elasticsearch", "scipy"),
}
"""The modules that must not be imported with those that a process imports."""


@pytest.mark.heavy
@pytest.mark.parametrize("modules", UNNEEDED)
def test_starting_a_process_imports_no_unneeded_library(modules: str) -> None:
    program = f"import {modules}, json, sys; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(json.loads(ran.stdout))
    assert "cli.main" in loaded
    assert [name for name in UNNEEDED[modules] if name in loaded] == []
