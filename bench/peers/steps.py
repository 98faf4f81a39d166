"""The measurements of each peer, and the cases (a) to (g) at which stores are known to fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.peers.driver import DriverFailed
from bench.peers.trial import HEALED_AFTER_SECONDS, Outcome, Trial

Result = dict[str, Any]
LOST_SHARE = 10
"""One row in so many is deleted."""
BURST = 8
"""Requests in a row that get 429."""


def measure(trial: Trial, documents: int) -> Result:
    """Measure a peer. Keys are those of bench/results/latest.json for the same measurements. Raises DriverFailed."""
    library = trial.library
    library.fill(documents)
    first = _sync_or_fail(trial, "the first load")
    chunks = len(trial.rows())
    if faults := trial.faults():
        name, fault = next(iter(faults.items()))
        raise DriverFailed(f"after the first load {len(faults)} documents are not as they should be: {name} {fault}")
    result: Result = {
        "chunks": chunks,
        "first_load_s": first.seconds,
        "embedded_at_first": first.embedded,
        "first_load_chunks_per_s": round(chunks / first.seconds, 1),
    }
    result["unchanged_s"] = _sync_or_fail(trial, "nothing changed").seconds
    some = library.some(0)
    library.edit_word(some)
    edited = _sync_or_fail(trial, "an edit")
    result |= {"edit_s": edited.seconds, "edit_reembedded_per_document": round(edited.embedded / len(some), 2)}
    library.delete(some)
    deleted = _sync_or_fail(trial, "a delete")
    left = sum(row.source in some for row in trial.rows())
    result |= {"delete_s": deleted.seconds, "deletes_gone": not left, "deleted_rows_left": left}
    library.add_long()
    _sync_or_fail(trial, "a long document")
    result["long_chunks"] = sum(row.source == "long.md" for row in trial.rows())
    library.insert_at_top()
    result["insert_paragraph_reembedded"] = _sync_or_fail(trial, "an insertion").embedded
    return result | {"rss_mb": trial.process.memory.peak_mb}


def cases(trial: Trial) -> Result:
    """Return for each case the texts embedded, whether the store was right at the end, and whether that came by itself
    (by the next ordinary run). The case that loses rows is last: not every store recovers from it."""
    results = {letter: case(trial) for letter, case in _CASES.items()}
    return dict(sorted(results.items()))


def _sync_or_fail(trial: Trial, what: str) -> Outcome:
    outcome = trial.sync()
    if outcome.error is not None:
        raise DriverFailed(f"{what}: {outcome.error}")
    return outcome


def _change_and_check(
    trial: Trial, change: Callable[[], object], names: Sequence[str] = (), healed_after: float | None = None
) -> Result:
    """Make a change, sync and check the store. names: the documents that it concerns; others that were wrong before do
    not count."""
    before = trial.faults().keys() - set(names)
    change()
    outcome = trial.sync(healed_after=healed_after)
    wrong = {name: fault for name, fault in trial.faults().items() if name not in before}
    result: Result = {
        "embedded": outcome.embedded,
        "seconds": outcome.seconds,
        "right": not wrong,
        "by_itself": not wrong,
    }
    if wrong:
        result |= {"wrong_documents": len(wrong), "such_as": next(iter(wrong.values()))}
    return result | ({"error": outcome.error} if outcome.error else {})


def _nothing() -> None:
    pass


def _edit_paragraph(trial: Trial) -> Result:
    names = trial.library.some(1)[:1]
    return _change_and_check(trial, lambda: trial.library.edit_paragraph(names), names)


def _delete_twins(trial: Trial) -> Result:
    gone = trial.library.add_twins()
    loaded = trial.sync()
    return _change_and_check(trial, lambda: trial.library.delete(gone)) | {"embedded_for_all": loaded.embedded}


def _embedder_fails(trial: Trial) -> Result:
    names = trial.library.some(2)
    trial.embedding.spoil(inputs_left=len(names) // 2)
    trial.library.edit_paragraph(names)
    remaining: set[str] = set()
    failed = trial.sync(
        healed_after=HEALED_AFTER_SECONDS, before_healing=lambda: remaining.update(row.source for row in trial.rows())
    )
    meanwhile = {
        "error_meanwhile": failed.error,
        "waited": failed.waited,
        "embedded_meanwhile": failed.embedded,
        "gone_meanwhile": len(set(names) - remaining),
    }
    return _change_and_check(trial, _nothing, names) | meanwhile


def _burst(trial: Trial) -> Result:
    names = trial.library.some(3)

    def change() -> None:
        trial.embedding.spoil(throttle=BURST)
        trial.library.edit_word(names)

    result = _change_and_check(trial, change, names, HEALED_AFTER_SECONDS)
    if not result["right"]:
        result["right_after_another_run"] = _change_and_check(trial, _nothing, names)["right"]
    return result


def _restrict(trial: Trial) -> Result:
    names = trial.library.some(4)
    return _change_and_check(trial, lambda: trial.library.restrict(names), names)


def _again(trial: Trial) -> Result:
    before = trial.written()
    result = _change_and_check(trial, _nothing)
    return result | {"rows_written": len(trial.written() - before)}


def _rows_vanish(trial: Trial) -> Result:
    result = _change_and_check(trial, lambda: trial.lose(LOST_SHARE))
    if not result["right"] and trial.repairs:
        repaired = trial.sync("repair")
        result |= {"right": not trial.faults(), "repair_s": repaired.seconds, "repair_embedded": repaired.embedded}
    return result


_CASES: dict[str, Callable[[Trial], Result]] = {
    "a": _edit_paragraph,
    "b": _delete_twins,
    "c": _embedder_fails,
    "e": _burst,
    "f": _restrict,
    "g": _again,
    "d": _rows_vanish,
}
