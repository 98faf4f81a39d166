# ruff: noqa: E501  (the table of mutants)
"""``make mutants``: deliberate defects of the protocol, each played against the simulation until a history fails.

A mutant is a textual change of one module, made while it is imported in a process of its own; no file is changed. An
anchor that is no longer in the module fails a test, so that the table does not rot.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "mutants.md"
HISTORIES = int(os.environ.get("SIMULATE_HISTORIES", "800"))
"""Played against a mutant before it counts as survived: some twenty seconds of one processor."""


class Mutant(NamedTuple):
    """One defect: in ``module`` the text ``anchor`` becomes ``defect``."""

    name: str
    module: str
    anchor: str
    defect: str


_FOLD, _DETECT, _DOCUMENTS = "pipeline.core.fold", "pipeline.stages.detect", "pipeline.ledger.documents"
_WORK, _KEYWORDS, _VECTORS = "pipeline.ledger.work", "pipeline.stages.keywords", "pipeline.stages.vectors"

MUTANTS: tuple[Mutant, ...] = (
    Mutant("content is not ordered by version", _FOLD, "return True if theirs > mine", "return True if True"),
    Mutant("an upsert from before a delete is taken", _FOLD, "event.observed_at <= state.deleted_floor", "False"),
    Mutant("of two access changes the later arrival wins", _FOLD, "event.observed_at < known", "False"),
    Mutant("at a tie the wider access wins", _FOLD, "set(state.acl_tags) & set(", "set(state.acl_tags) | set("),
    Mutant("at a tie required tags are dropped", _FOLD, "set(state.required_tags) | set(", "set(state.required_tags) & set("),
    Mutant("a delete from before the content ends it", _FOLD, "state.observed_at > event.observed_at:", "False:"),
    Mutant("a delete keeps the older floor", _FOLD, "max(state.deleted_floor", "min(state.deleted_floor"),
    Mutant("new metadata counts as unchanged", _FOLD, "if state.meta_hash != event.meta_hash:\n        return", "if False:\n        return"),
    Mutant("a new title is not written", "pipeline.stages.folding", "meta_changed or text_changed", "text_changed"),
    Mutant("what a version superseded is forgotten", "pipeline.stages.folding", "document.superseded.append(arrival)", "pass"),
    Mutant("what a delete brings back stays away", "pipeline.stages.folding", "_revive(document, superseded_by_version)", "pass"),
    Mutant("a manifest foreseen from another text is taken", _DETECT, "known is None or known.content_hash != digest", "known is None"),
    Mutant("no hints are sent", _DETECT, "if a.draws_seq or a.before.pending", "if False"),
    Mutant("erased texts keep their manifests", _DOCUMENTS, "if a.erased]", "if False]"),
    Mutant("only one store wants the change", _DOCUMENTS, "for store in STORES\n", "for store in STORES[:1]\n"),
    Mutant("a sequence number is drawn below the document's", _DOCUMENTS, "max(drawn, before.seq + 1)", "drawn"),
    Mutant("a claim skips the check of want_seq", _WORK, "if wants.get(id_) == want_seq]", "]"),
    Mutant("bodies of another text are used", _WORK, "digest == hashes[id_] and ", ""),
    Mutant("keywords confirms what was overtaken", _KEYWORDS, "still = [p for i, p in by_id.items() if wants.get(i) == p.work.want_seq]", "still = list(by_id.values())"),
    Mutant("keywords never catches up with the index", _KEYWORDS, "reached = [p for p in still if p.work.identity.id not in ahead]", "reached = still"),
    Mutant("a bulk is not recorded with its claim", _KEYWORDS, "if entries else None", "if False else None"),
    Mutant("late bulks are never checked", "pipeline.stages.late", "removed += await self._check_one(bulk)", "pass"),
    Mutant("an entry is deleted only if it was confirmed", "pipeline.core.diff", "(set(claimed) | set(confirmed)) - set(wanted)", "set(confirmed) - set(wanted)"),
    Mutant("a confirmed entry is not compared by its hash", "pipeline.core.diff", "confirmed.get(i) != made_of", "i not in confirmed"),
    Mutant("the keyword hash leaves out access", "pipeline.ledger.entry", '"acl_tags": list(w.acl_tags),', '"acl_tags": [],'),
    Mutant("vectors writes what was overtaken", _VECTORS, "still = [p for p in plans if wants.get(p.work.identity.id) == p.work.want_seq]", "still = list(plans)"),
    Mutant("vectors leaves what nobody wants", _VECTORS, "[i for p in still for i in p.gone]", "[]"),
    Mutant("access is not restamped", _VECTORS, "{p.work.identity.id: p.work.access_id for p in still}", "{}"),
    Mutant("vectors settles before every row is written", _VECTORS, "if not unstamped and written | refused", "if written | refused"),
    Mutant("texts that have vectors are embedded again", _VECTORS, "for chunk, text in texts.items() if text not in known}", "for chunk, text in texts.items()}"),
    Mutant("offsets are committed over gaps", "pipeline.core.progress", "self._next[partition] = grown[-1].offset + 1", "self._next[partition] = token.offset + 1"),
    Mutant("a record counts as done before it is", "pipeline.core.progress", "token = Token(offset)", "token = Token(offset, True)"),
    Mutant("a failing batch is acknowledged", "pipeline.stream.attempts", 'return "again"\n        except Exception', 'return "done"\n        except Exception'),
    Mutant("a membership opens nothing", "query.access", 'held.update(qualify(source, groups))', "pass"),
    Mutant("a write of an equal version is refused", "pipeline.stores.keywords", '"version_type": "external_gte"', '"version_type": "external"'),
    Mutant("the sweeper hints nothing", "pipeline.stages.sweep", "if not due:", "if True:"),
    Mutant("an announcement is noted before it was sent", "pipeline.stages.announce", "if not ready:\n            return 0", "if ready:\n            return 0"),
)  # fmt: skip


class _Finder:
    """Imports one module with its text changed."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: Any = None) -> ModuleSpec | None:
        if name != self._mutant.module:
            return None
        path = str(path_of(self._mutant))
        return importlib.util.spec_from_file_location(name, path, loader=_Loader(name, path, self._mutant))


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        source = Path(self.path).read_text()
        assert source.count(self._mutant.anchor) >= 1
        return compile(source.replace(self._mutant.anchor, self._mutant.defect, 1), self.path, "exec")


def path_of(mutant: Mutant) -> Path:
    """The module's file."""
    return ROOT / (mutant.module.replace(".", "/") + ".py")


def attack(number: int) -> int:
    """In a process of its own: print what caught the mutant, and after how many histories."""
    sys.meta_path.insert(0, _Finder(MUTANTS[number]))  # type: ignore[arg-type]
    from tests.simulation.play import History, play, simulated

    with simulated():
        for seed in range(1, HISTORIES + 1):
            if (kind := play(History(seed)).kind) is not None:
                print(f"{kind.rstrip(':')}|{seed}")
                return 0
    print("survived|")
    return 0


def _run(number: int) -> tuple[str, str]:
    command = [sys.executable, "-m", "tests.simulation.mutants", str(number)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    kind, _, seed = (done.stdout.strip().splitlines() or ["IMPORT|"])[-1].partition("|")
    print(f"{MUTANTS[number].name}: {kind} {seed}", flush=True)
    return kind, seed


def main() -> int:
    """Write the table; the exit code is 1 when a mutant survived."""
    began = time.monotonic()
    with ThreadPoolExecutor(int(os.environ.get("SIMULATE_PROCESSES", os.cpu_count() or 1))) as pool:
        caught = list(pool.map(_run, range(len(MUTANTS))))
    rows = [f"| {m.name} | `{m.module}` | {kind} | {seed} |" for m, (kind, seed) in zip(MUTANTS, caught, strict=True)]
    alive = sum(kind == "survived" for kind, _ in caught)
    TABLE.write_text(
        "# Mutants\n\nDeliberate defects of the protocol, and which law of the simulation they broke in which history"
        " (`make mutants` writes this\ntable; [ADR 41](adr/0041-deterministic-simulation.md)). BROKEN: a worker ended"
        f" by an exception. Of {len(MUTANTS)}, {len(MUTANTS) - alive} were caught\nwithin {HISTORIES:,} histories. One"
        " that survived is masked by another safeguard or not covered by the simulation.\n\n"
        "| Defect | Module | Law | History |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    print(f"{len(MUTANTS) - alive} of {len(MUTANTS)} caught in {time.monotonic() - began:.0f} s")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(attack(int(sys.argv[1])) if len(sys.argv) > 1 else main())
