"""The words of standing questions, and the index that counts them."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from query.standing.word_index import Entry, WordIndex, best
from query.standing.words import of_passage, weight, words_of

WORDS = st.lists(st.sampled_from("turbine dam reservoir valve pump spillway hall KB5034441 err_42 four".split()))  # noqa: SIM905


def entry(number: int, question: list[str], coverage: float = 0.75) -> Entry:
    words = words_of("acme", " ".join(question), (), is_full=False, coverage=coverage)
    return Entry(UUID(int=number), words.words, words.names, words.floor)


@given(st.lists(WORDS, max_size=8), WORDS, st.floats(0.1, 1.2))
def test_the_index_has_exactly_the_questions_whose_floor_a_passage_exceeds(
    questions: list[list[str]], passage: list[str], coverage: float
) -> None:
    entries = [entry(number, question, coverage) for number, question in enumerate(questions)]
    contents = of_passage("acme", " ".join(passage))
    margins = {e.id: weight(e.words, e.names, contents) - e.floor for e in entries}
    above = WordIndex(entries).above(contents, 9)
    assert {id_: margin for margin, id_ in above} == {id_: margin for id_, margin in margins.items() if margin > 0}
    assert [margin for margin, _ in above] == sorted((margin for margin, _ in above), reverse=True)


def test_a_repeated_question_counts_as_it_is_now() -> None:
    old = WordIndex([entry(1, ["turbine"]), entry(2, ["turbine", "dam"])])
    new = WordIndex([entry(1, ["valve"]), entry(3, ["turbine"])])
    passage = of_passage("acme", "The turbine of the dam.")
    assert set(best((old, new), passage, 9)) == {UUID(int=2), UUID(int=3)}
    assert best((old, WordIndex(())), of_passage("acme", "The turbine."), 9) == [UUID(int=1)]
    assert best((old, new), of_passage("acme", "A valve."), 9) == [UUID(int=1)]


def test_an_identifier_counts_more_than_all_words() -> None:
    question = "which valve of the pump did error KB5034441 close"
    words = words_of("acme", question, ["The pump has a valve that an error may close."], is_full=True, coverage=0.75)
    named = of_passage("acme", "Mended: KB5034441.")
    assert weight(words.words, words.names, named) > words.floor
    assert weight(words.words, words.names, of_passage("acme", "An error closes a valve of the pump.")) <= words.floor


def test_a_full_context_keeps_out_what_has_fewer_words_and_one_with_room_does_not() -> None:
    question, best = "how is the spillway of the dam opened", "The spillway of the dam is opened by hand."
    most = of_passage("acme", "The dam has a spillway.")
    for is_full, enters in ((True, False), (False, True)):
        words = words_of("acme", question, [best], is_full=is_full, coverage=0.5)
        assert (weight(words.words, words.names, most) > words.floor) is enters


def test_words_of_another_tenant_do_not_match() -> None:
    words = words_of("acme", "spillway of the dam", [], is_full=False, coverage=0.75)
    assert not of_passage("umbra", "The spillway of the dam.").intersection(words.words)
