"""The peers that are measured, and a virtual environment for each, made from its lock."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file
from pathlib import Path

from pipeline.embedding.tokens import CL100K

HERE = Path(__file__).parent
CL100K_CACHED_AS = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
"""tiktoken's name for cl100k_base in TIKTOKEN_CACHE_DIR: the SHA-1 of the address that it would load it from."""
OFFLINE = {
    "COCOINDEX_DISABLE_USAGE_TRACKING": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DO_NOT_TRACK": "1",
    "OTEL_SDK_DISABLED": "true",
}


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    module: str
    """Its driver. What is installed for it is in bench/peers/NAME.lock, which ``bench.peers.lock`` makes of NAME.txt;
    without that file it runs in the project's environment."""
    variant: str = ""
    keywords: bool = False
    """It also writes to an Elasticsearch, which is started for it."""

    @property
    def environment(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def lock(self) -> Path:
        return HERE / f"{self.environment}.lock"


PEERS = (
    Peer("penstock", "Penstock (Kafka, both stores)", "bench.peers.penstock"),
    Peer("penstock-watch", "Penstock that watches, in one process", "bench.peers.penstock", "watch"),
    Peer("pathway", "Pathway", "bench.peers.pathway"),
    Peer("pathway-cache", "Pathway with its cache", "bench.peers.pathway", "cache"),
    Peer("pathway-both", "Pathway (both stores)", "bench.peers.pathway", "both", keywords=True),
    Peer("pgai", "pgai vectorizer", "bench.peers.pgai"),
    Peer("langchain", "LangChain index() + PGVector", "bench.peers.langchain"),
    Peer("cocoindex", "CocoIndex", "bench.peers.cocoindex"),
    Peer("llamaindex", "LlamaIndex IngestionPipeline + PGVector", "bench.peers.llamaindex"),
    Peer("haystack", "Haystack", "bench.peers.haystack"),
)


class NotInstalled(Exception):
    """A peer's packages could not be installed; the message is one line."""


def python_of(peer: Peer, folder: Path, report: Callable[[str], None]) -> Path:
    """Return the interpreter that runs the peer's driver. Its environment is made anew when its lock changes. Raises
    NotInstalled, also where a file of the index is none of those that were locked."""
    if not peer.lock.exists():
        return Path(sys.executable)
    requirements = peer.lock.read_text()
    environment = folder / "environments" / peer.environment
    made_from, python = environment / "made-from.txt", environment / "bin" / "python"
    if made_from.exists() and made_from.read_text() == requirements:
        return python
    report(f"{peer.name}: installing {peer.lock.name}")
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    argv = [
        *(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--require-hashes", "--only-binary=:all:", "--no-deps", "-r", str(peer.lock)),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise NotInstalled(f"pip install -r {peer.lock.name}: {lines[-1][:300] if lines else 'no reason given'}")
    made_from.write_text(requirements)
    return python


def vocabulary(folder: Path) -> Path:
    """Return a TIKTOKEN_CACHE_DIR that contains cl100k_base, so that no peer downloads it."""
    cache = folder / "tiktoken"
    cache.mkdir(parents=True, exist_ok=True)
    with as_file(CL100K) as file:
        shutil.copyfile(file, cache / CL100K_CACHED_AS)
    return cache
