"""Quotations: the part of a passage that has most of the question's words, as Markdown that renders well."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt

from query.answers import quotations as module
from query.answers.model import NumberedPassage
from query.answers.quotations import MAX_QUOTATION_CHARACTERS, excerpt, quotations
from query.answers.sentences import Terms, terms_of
from tests.support.query.answers_kit import result

QUESTION = terms_of("How many days of travel are paid at the rate of 120?")


def test_an_excerpt_is_the_part_with_most_words_and_numbers_of_the_question() -> None:
    filler = "Nothing is said about it here at all. " * 20
    middle = "Travel is paid. The rate is 120 for all days."
    hits, text = excerpt(QUESTION, f"{filler}{middle} {filler}")
    assert hits == 5
    assert middle in text
    assert len(text) <= MAX_QUOTATION_CHARACTERS


def test_a_word_that_a_passage_repeats_counts_once() -> None:
    assert excerpt(QUESTION, "Travel. Travel! Travel? Travel.")[0] == 1


@pytest.mark.parametrize("sentence", ["。", "1. ", "? [1]", "! "])
def test_each_sentence_of_a_passage_is_analysed_once(monkeypatch: pytest.MonkeyPatch, sentence: str) -> None:
    """A passage of very short sentences was analysed hundreds of times."""
    text, analysed = sentence * 2_000, 0

    def counting(part: str) -> Terms:
        nonlocal analysed
        analysed += len(part)
        return terms_of(part)

    monkeypatch.setattr(module, "terms_of", counting)
    excerpt(QUESTION, text)
    assert 0 < analysed <= len(text)


def quoted(question: str, text: str, media_type: str = "text/markdown") -> str:
    passage = NumberedPassage(3, result(text, media_type=media_type), text)
    return quotations(question, [passage], ranked=True)[0]


def rendered(text: str) -> str:
    return MarkdownIt("commonmark", {"html": False}).enable("table").render(text)


CODE = "Undo it like this.\n\n```sh\n# the last commit\ngit revert HEAD\n```\n\nAll done.\n"


def test_a_block_of_code_is_quoted_whole_with_its_comments() -> None:
    html = rendered(quoted("git revert", CODE))
    assert '<pre><code class="language-sh"># the last commit\ngit revert HEAD\n</code></pre>' in html
    assert html.count("<blockquote>") == 1


def test_a_citation_after_a_block_of_code_stands_below_it() -> None:
    html = rendered(quoted("git revert", CODE.removesuffix("\n\nAll done.\n")))
    assert "</code></pre>\n<p>[3]</p>\n</blockquote>" in html


def test_a_part_of_a_long_block_of_code_is_a_block_of_code() -> None:
    lines = [f"step_{n}(with_an_argument={n})" for n in range(100)]
    html = rendered(quoted("step_50", "```python\n" + "\n".join(lines) + "\n```\n\nAfterwards."))
    assert 'class="language-python">step_' in html
    assert "step_50(with_an_argument=50)\n" in html
    assert "</code></pre>\n<p>[3]</p>" in html


def test_rows_of_a_table_are_quoted_below_its_header() -> None:
    rows = "\n".join(f"| Grade {n} | {n * 10} euros a day. Paid. |" for n in range(60))
    html = rendered(quoted("Grade 44", f"Rates:\n\n| Grade | Rate |\n| --- | ---: |\n{rows}\n"))
    assert "<th>Grade</th>" in html
    assert "<td>Grade 44</td>" in html
    assert "<td>Grade 1</td>" not in html
    assert "|" not in html


def test_source_code_is_quoted_as_code() -> None:
    html = rendered(quoted("area", "# Geometry\ndef area(*sides):\n    return sides\n", "text/x-python; charset=utf-8"))
    assert "<code># Geometry\ndef area(*sides):\n    return sides\n</code>" in html


def test_source_code_that_contains_a_fence_is_quoted_as_one_block() -> None:
    html = rendered(quoted("area", 'def area():\n    """\n    ```\n    area()\n    ```\n    """\n', "text/x-python"))
    assert html.count("<pre>") == 1


def test_headings_are_left_out_and_prose_stays_as_it_is() -> None:
    assert quoted("travel", "# Travel\n\nTravel is *paid*.\n- twice") == "> Travel is *paid*.\n> - twice [3]"


def test_a_word_without_end_is_shortened() -> None:
    assert len(quoted("aaa", "a" * 5_000)) < MAX_QUOTATION_CHARACTERS + 20
