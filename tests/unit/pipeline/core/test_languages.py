"""The language of a chunk, and the languages that a question may be in."""

from __future__ import annotations

import json

import pytest

from pipeline.core.languages import ANALYSED, ENGLISH, STOP_WORDS, language_of, languages_of_question
from tests.support.space import PROJECT

CHUNKS = {
    "arabic": "يجب على كل موظف تقديم طلب الإجازة قبل أسبوعين من بدايتها، ويوافق عليه "
    "المدير المباشر خلال ثلاثة أيام عمل.",
    "cjk": "休暇の申請は、開始日の二週間前までに人事部へ提出してください。上司は三日以内に承認します。",
    "czech": "Žádost o dovolenou musí zaměstnanec podat nejméně dva týdny předem a vedoucí ji schválí do tří dnů.",
    "danish": "Ansøgningen om ferie skal indsendes mindst to uger før den første dag, og "
    "lederen godkender den inden tre dage.",
    "dutch": "De aanvraag voor verlof moet minstens twee weken van tevoren worden ingediend en "
    "wordt door de leidinggevende goedgekeurd.",
    "finnish": "Lomahakemus on jätettävä vähintään kaksi viikkoa ennen loman alkua, ja "
    "esimies hyväksyy sen kolmen päivän kuluessa.",
    "french": "La demande de congé doit être déposée au moins deux semaines avant la date "
    "de début, et le responsable l'approuve.",
    "german": "Der Antrag auf Urlaub ist mindestens zwei Wochen vor dem ersten Tag zu "
    "stellen und wird von der Leitung genehmigt.",
    "greek": "Η αίτηση άδειας πρέπει να υποβάλλεται τουλάχιστον δύο εβδομάδες πριν από την "
    "έναρξή της και εγκρίνεται σε τρεις ημέρες.",
    "hindi": "छुट्टी का आवेदन शुरुआत से कम से कम दो सप्ताह पहले जमा करना होगा, और प्रबंधक तीन दिनों के भीतर इसे स्वीकृत करेगा।",
    "hungarian": "A szabadság iránti kérelmet legalább két héttel a kezdete előtt kell benyújtani, "
    "és a vezető három napon belül hagyja jóvá.",
    "italian": "La richiesta di ferie deve essere presentata almeno due settimane prima "
    "dell'inizio e viene approvata dal responsabile.",
    "norwegian": "Søknaden om ferie må sendes inn minst to uker før første fraværsdag, og "
    "lederen godkjenner den innen tre dager.",
    "portuguese": "O pedido de férias deve ser entregue pelo menos duas semanas antes do "
    "início e é aprovado pela chefia em três dias.",
    "romanian": "Cererea de concediu trebuie depusă cu cel puțin două săptămâni înainte de "
    "început și este aprobată de șef în trei zile.",
    "russian": "Заявление на отпуск нужно подать не позднее чем за две недели до его начала, "
    "и руководитель согласует его за три дня.",
    "spanish": "La solicitud de vacaciones debe presentarse al menos dos semanas antes de "
    "su inicio, y la aprueba el responsable.",
    "swedish": "Ansökan om semester ska lämnas in minst två veckor före den första dagen "
    "och godkänns av chefen inom tre dagar.",
    "turkish": "İzin talebi, izin başlamadan en az iki hafta önce verilmeli ve yönetici "
    "tarafından üç gün içinde onaylanmalıdır.",
}


def test_every_analysed_language_has_an_example_here() -> None:
    assert sorted(CHUNKS) == list(ANALYSED)


@pytest.mark.parametrize("language", CHUNKS)
def test_a_chunk_has_the_language_that_it_is_written_in(language: str) -> None:
    assert language_of(CHUNKS[language]) == language
    assert language_of(f"{CHUNKS[language]}\n\n    systemctl restart leave-api --now\n\n{CHUNKS[language]}") == language


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The request for leave has to be made two weeks before the first day, and the manager approves it.",
        "for (int i = 0; i < n; ++i) { total += values[i]; }\nreturn total / n;",
        "| 2026-01-04 | 1.204,50 | EUR |\n| 2026-01-05 | 88,00 | EUR |\n| 2026-02-11 | 3.000,00 | EUR |",
        "PROJ-4821 ERR_CONN_RESET 0x80070057 src/app/main.py v2.3.1",
        "Wniosek o urlop należy złożyć co najmniej dwa tygodnie przed pierwszym dniem, a kierownik zatwierdza go.",
    ],
)
def test_english_code_tables_names_and_languages_without_an_analyzer_have_none(text: str) -> None:
    assert language_of(text) is None


def test_chinese_and_korean_are_analysed_like_japanese() -> None:
    assert language_of("请假申请须在开始日期前两周提交，由部门经理在三天内批准。") == "cjk"
    assert language_of("휴가 신청서는 시작일 이 주 전까지 제출해야 하며 관리자가 사흘 안에 승인합니다.") == "cjk"


@pytest.mark.parametrize(
    ("question", "language"),
    [
        ("Wie beantrage ich Urlaub?", "german"),
        ("Urlaubsantrag genehmigen", "german"),
        ("Comment demander un congé ?", "french"),
        ("有給休暇の申請方法", "cjk"),
        ("как продлить договор аренды", "russian"),
    ],
)
def test_a_question_is_searched_in_its_own_language(question: str, language: str) -> None:
    assert language in languages_of_question(question)


def test_a_question_of_two_languages_is_searched_in_both() -> None:
    assert languages_of_question("Kubernetes のログはどこですか und wo ist das für Docker") == ("cjk", "german")


def test_an_english_question_is_searched_in_english_alone() -> None:
    assert languages_of_question("how do I request leave for the first week of January") == ()


def test_a_language_has_one_name_here_in_elasticsearch_and_in_snowball() -> None:
    plugin = json.loads((PROJECT / "deploy" / "local" / "analyzers" / "named_components.json").read_text())
    [analyzers] = plugin.values()
    assert sorted(analyzers) == sorted({ENGLISH, *ANALYSED})
    assert set(STOP_WORDS) <= {ENGLISH, *ANALYSED}
