"""Grouping and the gate: functions of the set of pairs, whatever order and batches they came in."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.conversations import (
    PAIRS_PER_CHUNK,
    Chunk,
    Pair,
    first_change,
    group,
    is_chunked,
    pair_digest,
    pieces,
    regroup_from,
    render,
    subject_digest,
)
from query.modes.history import History, Piece, _fitting

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def pair(n: int, minutes: int | None = None, answer: str = "yes") -> Pair:
    """minutes: when it was asked; default: in the order of their numbers."""
    asked_at = NOON + timedelta(minutes=n if minutes is None else minutes)
    return Pair(f"question {n}", answer, asked_at, pair_digest(f"question {n}", answer))


numbered = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), unique_by=lambda one: one[0], max_size=45)
"""Pairs of which many were asked at the same moment."""


class Kept:
    """The rows of one member, changed as pipeline.conversations.record changes them."""

    def __init__(self) -> None:
        self.pairs: dict[bytes, Pair] = {}
        self.chunks: list[Chunk] = []

    def change(self, added: Sequence[Pair], removed: Sequence[Pair] = ()) -> None:
        touched = {p.digest for p in (*added, *removed)}
        before = {d: p.time for d, p in self.pairs.items() if d in touched}
        for p in removed:
            self.pairs.pop(p.digest, None)
        for p in added:
            self.pairs[p.digest] = min(p, self.pairs.get(p.digest, p), key=lambda one: one.time)
        after = {d: p.time for d, p in self.pairs.items() if d in touched}
        place = first_change(before, after)
        if place is None:
            return
        ordered = sorted(self.pairs.values(), key=lambda p: p.place)
        position, number = regroup_from(sum(p.place < place for p in ordered))
        self.chunks = self.chunks[:position] + group(ordered[number:], first_position=position)


@given(numbered, st.randoms(use_true_random=False), st.lists(st.integers(1, 15), min_size=45, max_size=45))
def test_the_same_pairs_in_any_order_and_batches_give_the_same_chunks(
    questions: list[tuple[int, int]], dice: object, sizes: list[int]
) -> None:
    pairs = [pair(n, minutes) for n, minutes in questions]
    expected = group(pairs)
    pairs += pairs[:7]  # some come twice
    dice.shuffle(pairs)  # type: ignore[attr-defined]
    assert group({p.digest: p for p in pairs}.values()) == expected
    kept = Kept()
    for size in sizes:
        kept.change(pairs[:size])
        pairs = pairs[size:]
    assert kept.chunks == expected


@given(numbered, numbered)
def test_forgetting_pairs_gives_the_chunks_as_if_they_had_never_been_added(
    kept_pairs: list[tuple[int, int]], gone: list[tuple[int, int]]
) -> None:
    stays = [pair(n, minutes) for n, minutes in kept_pairs]
    leaves = [pair(n, minutes, answer="forget this") for n, minutes in gone]
    kept = Kept()
    kept.change(stays[::2])
    kept.change(leaves)
    kept.change(stays[1::2], removed=leaves)
    assert kept.chunks == group(stays)


@given(st.integers(0, 45), st.integers(1, 12))
def test_appending_pairs_changes_only_the_last_chunk(there: int, more: int) -> None:
    pairs = [pair(n) for n in range(there)]
    before = group(pairs)
    full = there // PAIRS_PER_CHUNK
    for n in range(there, there + more):
        pairs.append(pair(n))
        after = group(pairs)
        changed = [c for c in after if c not in before]
        assert len(changed) == 1, "one chunk is embedded for a pair"
        assert changed == [after[-1]]
        before = after
    assert group(pairs)[:full] == group(pairs[: full * PAIRS_PER_CHUNK])


@given(numbered)
def test_conversation_chunks_hold_every_pair_once_in_time_order(questions: list[tuple[int, int]]) -> None:
    chunks = group(pair(n, minutes) for n, minutes in questions)
    ordered = sorted((pair(n, minutes) for n, minutes in questions), key=lambda p: (p.time, p.digest))
    assert "\n\n".join(chunk.text for chunk in chunks) == "\n\n".join(p.text for p in ordered)
    assert [chunk.position for chunk in chunks] == list(range(len(chunks)))
    assert all(chunk.text.count("Question: ") == PAIRS_PER_CHUNK for chunk in chunks[:-1])
    assert all(chunk.last_at <= two.first_at for chunk, two in pairwise(chunks))
    assert len({chunk.digest for chunk in chunks}) == len(chunks)


def test_a_late_pair_changes_only_the_chunks_from_its_place_on() -> None:
    pairs = [pair(n) for n in range(35)]
    late = pair(99, minutes=14)
    before, after = group(pairs), group([*pairs, late])
    assert after[0] == before[0]
    assert first_change({}, {late.digest: late.time}) == late.place
    assert regroup_from(15) == (1, 10)


def test_a_pair_that_quotes_another_has_another_digest_than_the_two_pairs() -> None:
    """Question and answer may quote anything: what tells chunks apart is not how they read."""
    two = [Pair("a", "b", NOON, pair_digest("a", "b")), Pair("c", "d", NOON, pair_digest("c", "d"))]
    two.sort(key=lambda p: p.place)
    answer = f"{two[0].answer}\n\n{two[1].text}"
    one = Pair(two[0].question, answer, NOON, pair_digest(two[0].question, answer))
    assert group(two)[0].text == group([one])[0].text
    assert group(two)[0].digest != group([one])[0].digest
    assert subject_digest("ada", "a", "b/c") != subject_digest("ada", "a/b", "c") != subject_digest("ada")


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20))
def test_a_history_once_chunked_stays_chunked_even_if_it_becomes_shorter(totals: list[int]) -> None:
    chunked = False
    seen = []
    for tokens in totals:  # forgetting makes a history shorter again
        chunked = is_chunked(already=chunked, tokens=tokens, gate_tokens=300)
        seen.append(chunked)
    assert seen == sorted(seen)
    assert chunked == (max(totals) >= 300)


@given(st.text(max_size=400), st.integers(1, 30))
def test_pieces_fit_the_window_and_lose_only_whitespace(text: str, window: int) -> None:
    def count(texts: Sequence[str]) -> list[int]:
        return [len(t) for t in texts]

    cut_pieces = pieces(text, window=window, count_tokens=count)
    assert all(tokens == len(part) and (tokens <= window or tokens == 1) for part, tokens in cut_pieces)
    assert "".join("".join(part for part, _ in cut_pieces).split()) == "".join(text.split())


def test_pieces_are_cut_between_pairs_where_possible() -> None:
    text = "\n\n".join(render(f"question {n}", "An answer.\n\nWith a second paragraph.") for n in range(4))
    cut_pieces = pieces(text, window=len(text) // 2, count_tokens=lambda texts: [len(t) for t in texts])
    assert len(cut_pieces) == 2
    assert all(part.startswith("Question: ") for part, _ in cut_pieces)


def test_history_keeps_the_pieces_that_fit_the_budget_and_notes_missing_ones() -> None:
    chunks = [Piece(f"{n}", NOON, NOON, tokens) for n, tokens in enumerate((60, 70, 30, 20))]
    assert [piece.text for piece in _fitting(chunks, 100)] == ["0", "2"]
    assert _fitting(chunks, 10) == []
    assert History("whole", chunks, 0, 180).notes == []
    assert History("whole", chunks, 3, 500).notes == ["the history's 3 oldest pairs did not fit the budget"]
    assert "2 chunks" in str(History("nearest", chunks, 0, 500, without_embedding=2).notes)
