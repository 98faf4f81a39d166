"""Whether results that get worse are noticed, and new questions are not taken for it."""

from __future__ import annotations

from itertools import pairwise
from uuid import UUID

from query.evaluation.baseline import Change, Value, changes, digest, unaccepted
from query.evaluation.golden import Golden, Judged

Made = dict[UUID, dict[str, Value]]


def values(*numbers: float, by: str = "judged") -> Made:
    return {UUID(int=n): {"nDCG@5": Value(number, by)} for n, number in enumerate(numbers)}


def change(now: Made, baseline: Made) -> Change:
    return changes(now, baseline, {id_: ["*"] for id_ in now})["*", "nDCG@5"]


GOOD = values(*[0.9] * 10)


def test_a_new_hard_question_changes_nothing() -> None:
    with_hard = GOOD | {UUID(int=99): {"nDCG@5": Value(0.0, "judged")}}
    first = change(with_hard, GOOD)
    assert (first.ratio, first.p, first.questions) == (0.0, 1.0, 10)
    assert first.accepted < 0.82, "the floor must not be passed by the question: the accepted mean falls with it"
    accepted = GOOD | unaccepted(with_hard, GOOD)
    assert accepted.keys() == with_hard.keys()
    again = change(with_hard, accepted)
    assert (again.ratio, again.p, again.questions) == (0.0, 1.0, 11)


def test_a_decline_too_slow_to_see_from_run_to_run_is_significant_in_the_end() -> None:
    """Ten weeks, in each of which every question loses 0.5 %."""
    baseline: Made = {}
    seen = []
    for week in range(11):
        now = values(*(0.9 * 0.995**week - 0.001 * n for n in range(10)))
        seen.append(change(now, baseline))
        baseline |= unaccepted(now, baseline)
    assert seen[0].questions == 0
    assert all(-0.006 < after.ratio - before.ratio < 0 for before, after in pairwise(seen[1:]))
    assert seen[1].ratio > -0.02
    assert seen[-1].ratio < -0.02
    assert seen[-1].p < 0.05


def test_one_bad_question_of_many_is_not_significant() -> None:
    now = GOOD | {UUID(int=0): {"nDCG@5": Value(0.0, "judged")}}
    single = change(now, GOOD)
    assert single.ratio < -0.02
    assert single.p > 0.05


def test_a_question_that_is_judged_anew_is_not_compared_with_its_earlier_judgements() -> None:
    now = values(*[0.1] * 10, by="judged anew")
    assert change(now, GOOD).questions == 0
    assert unaccepted(now, GOOD) == now
    assert unaccepted(GOOD, GOOD) == {}


def test_the_digest_covers_judgements_the_person_and_the_judge() -> None:
    golden = Golden("acme", "q", (Judged("wiki", "a"), Judged("wiki", "b")), ("ann",), (), "It is so.")
    swapped = Golden("acme", "q", golden.judged[::-1], ("ann",), (), "It is so.")
    assert digest(golden) == digest(swapped)
    assert len({digest(golden), digest(golden, "judge"), digest(golden, "other judge")}) == 3
    for other in (
        Golden("acme", "q", golden.judged[:1], ("ann",)),
        Golden("acme", "q", golden.judged, ("bob",)),
        Golden("acme", "q", golden.judged, ("ann",), ("staff",)),
    ):
        assert digest(other) != digest(golden)
    reworded = Golden("acme", "q", golden.judged, ("ann",), (), "It is otherwise.")
    assert digest(reworded) == digest(golden), "a reference does not matter to a ranking"
    assert digest(reworded, "judge") != digest(golden, "judge")
