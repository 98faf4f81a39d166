"""The words of standing questions: a passage above a question's floor has one of its anchors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from query.standing.words import of_passage, weight, words_of

WORDS = st.lists(st.sampled_from("turbine dam reservoir valve pump spillway hall KB5034441 err_42 four".split()))  # noqa: SIM905


@given(WORDS, st.lists(WORDS, max_size=3), WORDS, st.booleans(), st.floats(0.1, 1.2))
def test_a_passage_above_the_floor_has_an_anchor(
    question: list[str], context: list[list[str]], passage: list[str], is_full: bool, coverage: float
) -> None:
    texts = [" ".join(words) for words in context]
    words = words_of("acme", " ".join(question), texts, is_full=is_full, coverage=coverage)
    contents = of_passage("acme", " ".join(passage))
    if weight(words.words, words.names, contents) > words.floor:
        assert contents.intersection(words.anchors)


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
