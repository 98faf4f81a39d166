"""The words that a question and a passage have in common, in several languages."""

from __future__ import annotations

import pytest

from pipeline.core.languages import STOP_WORDS, language_of_question
from query.retrieval.words import best_coverage, coverage, stems


@pytest.mark.parametrize(
    ("query", "text", "share"),
    [("running the tests", "test runs", 1.0), ("naïve Café", "a naïve café", 1.0), ("the of and", "the of and", 0.0)],
)
def test_coverage_is_the_share_of_query_words_in_the_text(query: str, text: str, share: float) -> None:
    assert coverage(stems(query), text) == share


@pytest.mark.parametrize(
    ("language", "query", "text"),
    [
        ("german", "Wie kündige ich die Versicherungen meiner Häuser?", "Kündigung: das Haus und seine Versicherung"),
        ("french", "Comment puis-je demander l'accès aux archives ?", "Les demandes d'accès à l'archive"),
        ("spanish", "¿Cuándo se pagan las facturas vencidas?", "La factura vencida se paga el lunes"),
        ("italian", "Come si chiedono i permessi di lavoro?", "Il permesso per lavorare si chiede prima"),
        ("dutch", "Hoe vraag ik de vergoeding van mijn reizen aan?", "Vergoedingen: vragen voor een reis"),
        ("czech", "Jak se schvalují žádosti o dovolenou?", "Žádost o dovolenou schvaluje vedoucí"),
        ("danish", "Hvordan godkendes ansøgninger om ferier?", "Ansøgningen om ferie godkendes af lederen"),
        ("greek", "Πώς υποβάλλονται οι αιτήσεις αδειών;", "Η αίτηση άδειας υποβάλλεται"),
        ("hindi", "छुट्टियों का आवेदन कैसे करें", "छुट्टी के आवेदनों को जमा करें"),
        ("turkish", "İzin talepleri için onaylar nasıl verilir?", "İzin talebi yönetici tarafından onay ile verilir"),
        ("russian", "Как продлить договоры аренды?", "Договор об аренде продлить заранее"),
    ],
)
def test_words_match_in_other_forms_of_the_same_language(language: str, query: str, text: str) -> None:
    assert language_of_question(query) == language
    assert best_coverage(query, ["Nothing of the kind", text]) >= 0.6
    assert best_coverage(query, ["Nothing of the kind"]) == 0.0


def test_function_words_of_a_language_are_not_common_words() -> None:
    assert stems("wie ist das bei der und von den", "german") == set()


def test_a_language_without_spaces_is_compared_by_neighbouring_characters() -> None:
    assert best_coverage("有給休暇の申請", ["有給休暇の申請方法について"]) == 1.0
    assert best_coverage("有給休暇の申請", ["会議室の予約方法"]) < 0.4


def test_identifiers_are_compared_whole() -> None:
    assert stems("Closing v2.3.1 of PROJ-4821") == {"close", "v2.3.1", "proj-4821"}
    assert best_coverage("PROJ-4821", ["PROJ-4822 and PROJ-48210"]) == 0.0


def test_every_language_has_a_stemmer() -> None:
    assert all(stems("zebra", language) for language in STOP_WORDS)
