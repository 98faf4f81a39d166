"""Whether a question asks for what is new, or names a time. Pure, given today's date.

``latest`` asks for the most recent documents about something; ``this week``, ``in October 2026`` and ``yesterday`` name
a period. The documents of a period are added to those that the search finds and never replace them: a date may be what
a document is about, and not when it was written (docs/modes.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from itertools import islice
from typing import Literal

from pipeline.core.languages import ENGLISH, language_of_question

Unit = Literal["day", "week", "month", "year"]


@dataclass(frozen=True, slots=True)
class Recency:
    phrase: str
    """The words of the question that ask for it."""
    topic: str
    """The question without them."""
    since: datetime | None = None
    """The beginning of the period; None, with ``before``: no period."""
    before: datetime | None = None
    """Its end, exclusive."""


LATEST: Mapping[str, str] = {
    "english": r"latest|newest|most recent(?:ly)?|recent(?:ly)?|what(?:'s| is) new|lately|up[- ]to[- ]date",
    "german": r"neu(?:e)?ste[nrsm]?|aktuellste[nrsm]?|jüngste[nrsm]?|zuletzt|kürzlich|neulich|was gibt es neues",
    "french": r"plus récente?s?|dernières? (?:nouvelles|versions?)|récemment|quoi de neuf",
    "spanish": r"más recientes?|últim[ao]s (?:noticias|versiones)|recientemente|qué hay de nuevo",
    "italian": r"più recent[ei]|ultimissim[aeio]|recentemente|novità",
    "portuguese": r"mais recentes?|recentemente|novidades",
    "dutch": r"nieuwste|meest recente|recentste|onlangs|recentelijk",
    "swedish": r"senaste|nyaste|nyligen",
    "russian": r"последни[ехй]|новейши[ехй]|недавно|что нового",
}
"""Words that ask for what is new, by language."""

_PERIODS: Mapping[str, Mapping[str, tuple[Unit, int]]] = {
    "english": {
        "today": ("day", 0),
        "yesterday": ("day", 1),
        "this week": ("week", 0),
        "last week": ("week", 1),
        "this month": ("month", 0),
        "last month": ("month", 1),
        "this year": ("year", 0),
        "last year": ("year", 1),
    },
    "german": {
        "heute": ("day", 0),
        "gestern": ("day", 1),
        "diese woche": ("week", 0),
        "dieser woche": ("week", 0),
        "letzte woche": ("week", 1),
        "letzter woche": ("week", 1),
        "diesen monat": ("month", 0),
        "diesem monat": ("month", 0),
        "letzten monat": ("month", 1),
        "dieses jahr": ("year", 0),
        "diesem jahr": ("year", 0),
        "letztes jahr": ("year", 1),
    },
    "french": {
        "aujourd'hui": ("day", 0),
        "hier": ("day", 1),
        "cette semaine": ("week", 0),
        "la semaine dernière": ("week", 1),
        "ce mois-ci": ("month", 0),
        "le mois dernier": ("month", 1),
        "cette année": ("year", 0),
        "l'année dernière": ("year", 1),
    },
    "spanish": {
        "hoy": ("day", 0),
        "ayer": ("day", 1),
        "esta semana": ("week", 0),
        "la semana pasada": ("week", 1),
        "este mes": ("month", 0),
        "el mes pasado": ("month", 1),
        "este año": ("year", 0),
        "el año pasado": ("year", 1),
    },
    "italian": {
        "oggi": ("day", 0),
        "ieri": ("day", 1),
        "questa settimana": ("week", 0),
        "la settimana scorsa": ("week", 1),
        "questo mese": ("month", 0),
        "il mese scorso": ("month", 1),
        "quest'anno": ("year", 0),
        "l'anno scorso": ("year", 1),
    },
    "portuguese": {
        "hoje": ("day", 0),
        "ontem": ("day", 1),
        "esta semana": ("week", 0),
        "a semana passada": ("week", 1),
        "este mês": ("month", 0),
        "o mês passado": ("month", 1),
        "este ano": ("year", 0),
        "o ano passado": ("year", 1),
    },
    "dutch": {
        "vandaag": ("day", 0),
        "gisteren": ("day", 1),
        "deze week": ("week", 0),
        "vorige week": ("week", 1),
        "deze maand": ("month", 0),
        "vorige maand": ("month", 1),
        "dit jaar": ("year", 0),
        "vorig jaar": ("year", 1),
    },
    "swedish": {
        "idag": ("day", 0),
        "igår": ("day", 1),
        "den här veckan": ("week", 0),
        "förra veckan": ("week", 1),
        "den här månaden": ("month", 0),
        "förra månaden": ("month", 1),
        "i år": ("year", 0),
        "förra året": ("year", 1),
    },
    "russian": {
        "сегодня": ("day", 0),
        "вчера": ("day", 1),
        "на этой неделе": ("week", 0),
        "на прошлой неделе": ("week", 1),
        "в этом месяце": ("month", 0),
        "в прошлом месяце": ("month", 1),
        "в этом году": ("year", 0),
        "в прошлом году": ("year", 1),
    },
}
"""Periods that contain or precede today, by language: the unit, and how many of them ago."""
_CODES: Mapping[str, str] = {
    "english": "en",
    "german": "de",
    "french": "fr",
    "spanish": "es",
    "italian": "it",
    "portuguese": "pt",
    "dutch": "nl",
    "swedish": "sv",
    "russian": "ru",
}
_LAST = re.compile(
    r"\b(?:in |during |over |within )?the (?:last|past) (\d{1,3}) (day|week|month|year)s?\b", re.IGNORECASE
)
_AS_CONTENT = re.compile(r"\b(?:version|release|python|windows|office|edition|model|iso|rfc)\s*$", re.IGNORECASE)
"""A number after one of these words is no year."""
_SINCE = re.compile(r"\b(?:since|seit(?: dem)?|depuis(?: le)?|desde(?: el)?|dal|sinds|sedan)\s*$", re.IGNORECASE)
_MONTH = r"[^\W\d_]{3,20}"
_YEAR = r"(?:19|20)\d\d"
_DATE = re.compile(
    rf"(?<![\w./-])(?:{_YEAR}-\d\d(?:-\d\d)?|\d{{1,2}}\.\d{{1,2}}\.{_YEAR}|\d{{1,2}}/\d{{1,2}}/{_YEAR}"
    rf"|\d{{1,2}}(?:st|nd|rd|th|º|er)?\.?\s+(?:de\s+)?{_MONTH}\.?,?\s+(?:de\s+)?{_YEAR}"
    rf"|{_MONTH}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+{_YEAR}|{_MONTH}\.?\s+(?:de\s+)?{_YEAR}"
    rf"|\d{{1,2}}(?:st|nd|rd|th)?\.?\s+(?:[A-Z]\w{{2,20}}|\w{{4,20}}))(?![\w/-]|\.\d)"
)
"""Texts that may be dates; the library decides."""
MOST_LOOKED_AT = 10
"""So many of them are looked at: the library takes a millisecond and more for each, and a question may have a
thousand."""
LONGEST_BEFORE = 20
"""How many characters before a date are looked at for a word that says what it is."""


def recency(question: str, today: date) -> Recency | None:
    """The recency that a question asks for; None: it does not. It imports the library at the first text that may be a
    date, which takes a few tenths of a second."""
    recognised = language_of_question(question)
    language = recognised if recognised in LATEST else ENGLISH
    return _relative(question, language, today) or _dated(question, language, today) or _latest(question, language)


def _relative(question: str, language: str, today: date) -> Recency | None:
    if match := _LAST.search(question):
        days = {"day": 1, "week": 7, "month": 30, "year": 365}[match[2].lower()] * int(match[1])
        return _of(question, match, today - timedelta(days=days), today + timedelta(days=1))
    for phrase, (unit, ago) in _PERIODS[language].items():
        if match := re.search(rf"\b{phrase}\b", question, re.IGNORECASE):
            return _of(question, match, *_period(today, unit, ago))
    return None


def _dated(question: str, language: str, today: date) -> Recency | None:
    for match in islice(_DATE.finditer(question), MOST_LOOKED_AT):
        before = question[max(0, match.start() - LONGEST_BEFORE) : match.start()]
        if not _AS_CONTENT.search(before) and (period := _parsed(match[0], language, today)):
            since, end = period
            return _of(question, match, since, today + timedelta(days=1) if _SINCE.search(before) else end)
    return None


def _latest(question: str, language: str) -> Recency | None:
    match = re.search(rf"\b(?:{LATEST[language]})\b", question, re.IGNORECASE)
    return _of(question, match) if match else None


def _of(question: str, match: re.Match[str], since: date | None = None, before: date | None = None) -> Recency:
    topic = " ".join(f"{question[: match.start()]} {question[match.end() :]}".split())
    return Recency(match[0], topic, _midnight(since), _midnight(before))


def _midnight(day: date | None) -> datetime | None:
    return None if day is None else datetime.combine(day, time(), UTC)


def _period(day: date, unit: str, ago: int) -> tuple[date, date]:
    """The days of a unit of the calendar, ``ago`` units before the one that contains ``day``: the first, and the one
    after the last."""
    match unit:
        case "day":
            return day - timedelta(days=ago), day - timedelta(days=ago - 1)
        case "week":
            monday = day - timedelta(days=day.weekday() + 7 * ago)
            return monday, monday + timedelta(days=7)
        case "month":
            months = 12 * day.year + day.month - 1 - ago
            return _first(months), _first(months + 1)
    return date(day.year - ago, 1, 1), date(day.year - ago + 1, 1, 1)


def _first(months: int) -> date:
    return date(months // 12, months % 12 + 1, 1)


def _parsed(text: str, language: str, today: date) -> tuple[date, date] | None:
    """The period that a date names; None: it is none, or lies in the future."""
    from dateparser.date import DateDataParser  # here: it is slow to import, and few questions name a date

    settings = {
        "RELATIVE_BASE": datetime.combine(today, time()),
        "PREFER_DATES_FROM": "past",
        "PREFER_DAY_OF_MONTH": "first",
        "REQUIRE_PARTS": ["month"],
        "PARSERS": ["absolute-time"],
    }
    if "." in text:
        settings["DATE_ORDER"] = "DMY"
    # A short question has few function words: its language may be another one.
    for languages in ([_CODES[language]], list(_CODES.values())):
        named = DateDataParser(languages=languages, settings=settings).get_date_data(text)
        if named.date_obj is not None:
            day = named.date_obj.date()
            return _period(day, named.period, 0) if named.period in ("day", "month") and day <= today else None
    return None
