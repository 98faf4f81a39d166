"""A passage as statements that can be compared: the content words of each sentence, and apart from them its values.

Two statements with equal ``key`` say the same of the same, except that their values or their negation may differ. What
formatting and grammar add is no part of the key: markup, case, function words, the plural's ``s``. No dictionary is
needed, so that an unknown language works too, without its function words and negations. Pure, and linear in the text.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise, starmap
from typing import Literal, NamedTuple

from pipeline.core.languages import STOP_WORDS, UNSPACED
from pipeline.core.model import Span
from pipeline.core.sentences import sentence_ends

ValueKind = Literal["number", "date", "version", "unit"]
Said = tuple[tuple[str, ...], tuple[tuple[str, str, str], ...], bool]
"""The words, the values and the negation of a statement."""

MOST_CHARACTERS = 20_000
"""How much of a passage is read. A chunk has about 2,000 characters; only an unusual one is longer."""
MOST_WORDS = 120
"""The most content words of a statement; what is longer is a table or a list of names."""
CODE_SHARE = 0.06
"""The share of brackets and operators from which on a sentence is code."""

NEGATIONS = frozenset(
    """
    not no never cannot without nor neither none nothing nobody hardly
    nicht kein keine keinen keinem keiner keines nie niemals ohne weder
    pas jamais sans aucun aucune nunca sin ningún ninguna ninguno jamás tampoco non mai senza nessun nessuno nessuna
    não sem nenhum nenhuma niet geen nooit zonder inte aldrig utan ingen inget inga ikke aldri uden uten
    ei eivät ilman nem nincs soha nélkül nu niciodată fără değil yok asla není nikdy bez žádný
    не нет никогда без ни δεν μη μην χωρίς ποτέ لا لم لن ليس بدون नहीं न बिना 不 没 沒 未 無 无 非
    """.split()  # noqa: SIM905
)
OPPOSITES = {
    "disabled": "enabled",
    "disable": "enable",
    "unsupported": "supported",
    "invalid": "valid",
    "optional": "required",
    "forbidden": "allowed",
    "prohibited": "allowed",
    "disallowed": "allowed",
    "unavailable": "available",
    "unsafe": "safe",
    "insecure": "secure",
    "inactive": "active",
    "unchanged": "changed",
    "impossible": "possible",
    "incompatible": "compatible",
    "unlimited": "limited",
    "false": "true",
    "excluded": "included",
    "deaktiviert": "aktiviert",
    "verboten": "erlaubt",
    "ungültig": "gültig",
    "désactivé": "activé",
    "interdit": "autorisé",
}
"""A word and its opposite, whose negation it is."""
REFERENCES = frozenset("see siehe voir véase vedi zie refer".split())  # noqa: SIM905
"""Words of sentences that refer to another place, which may well be another in each passage."""
_STOP = (
    frozenset().union(*STOP_WORDS.values()) - NEGATIONS - frozenset({"two", "dos", "zero"})
    | frozenset({"always", "toujours", "immer", "siempre", "sempre"})
    | frozenset({"the", "do", "does", "did"})
)
_NUMERALS = {
    word: float(n)
    for n, word in enumerate(
        """zero _ two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
        eighteen nineteen twenty""".split()  # noqa: SIM905
    )
} | {"thirty": 30.0, "forty": 40.0, "fifty": 50.0, "sixty": 60.0, "ninety": 90.0, "hundred": 100.0}
_MONTHS = {
    name: f"{n:02}"
    for n, names in enumerate(
        (
            "january jan januar janvier enero",
            "february feb februar février febrero",
            "march mar märz mars marzo",
            "april apr avril abril",
            "may mai mayo",
            "june jun juni juin junio",
            "july jul juli juillet julio",
            "august aug août agosto",
            "september sep sept septembre septiembre",
            "october oct oktober octobre octubre",
            "november nov novembre noviembre",
            "december dec dezember décembre diciembre",
        ),
        start=1,
    )
    for name in names.split()
}
_MEANT = NEGATIONS | OPPOSITES.keys() | _NUMERALS.keys() | _MONTHS.keys()
"""Words that say how many, when, or not."""
_DIMENSIONS: dict[str, dict[str, float]] = {
    "time": {
        "ns nanosecond nanoseconds": 1e-9,
        "µs us microsecond microseconds": 1e-6,
        "ms millisecond milliseconds millisekunden": 1e-3,
        "s sec secs second seconds sekunde sekunden seconde secondes segundos": 1,
        "min mins minute minutes minuten minutos": 60,
        "h hr hrs hour hours stunde stunden heure heures horas": 3600,
        "d day days tag tage tagen jour jours días": 86400,
        "week weeks woche wochen semaine semaines semanas": 604800,
        "month months monat monate monaten mois meses": 2629746,
        "year years jahr jahre jahren ans années años": 31556952,
    },
    "size": {
        "bit bits": 0.125,
        "b byte bytes": 1,
        "kb kilobyte kilobytes": 1e3,
        "mb megabyte megabytes": 1e6,
        "gb gigabyte gigabytes": 1e9,
        "tb terabyte terabytes": 1e12,
        "kib": 2**10,
        "mib": 2**20,
        "gib": 2**30,
        "tib": 2**40,
    },
    "length": {
        "mm": 1e-3,
        "cm": 1e-2,
        "m meter meters metre metres": 1,
        "km kilometer kilometers": 1e3,
        "inch inches": 0.0254,
        "ft feet": 0.3048,
        "mile miles": 1609.344,
    },
    "mass": {"mg": 1e-3, "g gram grams gramm": 1, "kg kilogram kilograms": 1e3},
    "share": {"% percent prozent pourcent": 1},
    "dollar": {"$ usd dollar dollars": 1},
    "euro": {"€ eur euro euros": 1},
    "pound": {"£ gbp": 1},
    "character": {"character characters zeichen": 1},
    "temperature": {"°c celsius": 1},
    "fahrenheit": {"°f fahrenheit": 1},
}
_UNITS = {
    name: (dimension, factor)
    for dimension, units in _DIMENSIONS.items()
    for names, factor in units.items()
    for name in names.split()
}
_RELEASES = frozenset("version versions release python v edition ver".split())  # noqa: SIM905

_PIECES = r"-?\d+(?:[.,:/-]\d+)*(?:[a-zµ]{1,3}\d{0,3}(?![\w]))?[%°]?|[$€£]|[<>=!]=|[<>+]"
_TOKEN = re.compile(rf"{_PIECES}|\w+(?:[-.'’]\w+)*", re.IGNORECASE)
_TOKEN_UNSPACED = re.compile(rf"{_PIECES}|{UNSPACED.pattern}|[A-Za-zÀ-ÿ_]+", re.IGNORECASE)
_HEADINGS = re.compile(r"\s*(?:#{1,6}[ \t][^\n]*\n)+")
_CODE = re.compile(r"[][(){}=<>;|+*/\\]")
_IS_CODE = re.compile(r">>>|::=|\bdef \w+\(|^[ \t]*(?:from \w+ )?import \w", re.MULTILINE)
_PARTS_OF_NUMBER = re.compile(r"(-?\d+(?:[.,:/-]\d+)*)([a-zµ%°]*)(\d*)", re.IGNORECASE)
_THOUSANDS = re.compile(r",(?=\d{3}(?!\d))")
_ELISION = re.compile(r"^(?:[cdjlmnst]|qu)'(?=\w\w)")
_ISO_DATE = re.compile(r"(\d{4})[-/](\d{1,2})(?:[-/](\d{1,2}))?$")
_DAY_FIRST = re.compile(r"(\d{1,2})[./-](\d{1,2})[./-](\d{4})$")


class Value(NamedTuple):
    """A value in a statement, in a form in which equal values are equal."""

    kind: ValueKind
    form: str
    """Quantities in the unit that is the first of their dimension, dates as ISO 8601, versions as they are written."""
    dimension: str
    """The dimension of a quantity with a unit; empty for others."""
    amount: str
    """The number of a quantity in the unit that it is written in."""
    span: Span


class Name(NamedTuple):
    """A name in a statement: an identifier, or what is capitalised or quoted within a sentence."""

    words: tuple[str, ...]
    """It as words of the key: several for a first and a last name."""
    span: Span


class Statement(NamedTuple):
    """A sentence that can be compared with another."""

    key: tuple[str, ...]
    """Its content words, sorted, with ``#`` in place of a value."""
    weight: int
    """How many different content words it has."""
    said: Said
    """Equal for statements that say the same."""
    values: tuple[Value, ...]
    negations: tuple[Span, ...]
    names: tuple[Name, ...]
    span: Span

    @property
    def negated(self) -> bool:
        return self.said[2]


def statements_of(text: str) -> list[Statement]:
    """The statements of a passage, in order. Code, headings of one or two words and questions are none. A heading in
    Markdown is no part of a statement below it."""
    text = text[:MOST_CHARACTERS]
    pattern = _TOKEN_UNSPACED if UNSPACED.search(text) else _TOKEN
    read = (
        _statement(text, start, end, pattern)
        for start, end in starmap(partial(_below_headings, text), pairwise([0, *sentence_ends(text)]))
        if not _is_code(text, start, end)
    )
    return [statement for statement in read if statement is not None]


def _below_headings(text: str, start: int, end: int) -> Span:
    """The sentence without headings before it, from which no empty line separates it."""
    headings = _HEADINGS.match(text, start, end)
    return (headings.end(), end) if headings is not None and text[headings.end() : end].strip() else (start, end)


def _is_code(text: str, start: int, end: int) -> bool:
    part = text[start:end]
    return (
        len(_CODE.findall(part)) > CODE_SHARE * len(part)
        or part.rstrip().endswith("?")
        or _IS_CODE.search(part) is not None
    )


def _statement(text: str, start: int, end: int, pattern: re.Pattern[str]) -> Statement | None:
    key: list[str] = []
    values: list[Value] = []
    negations: list[Span] = []
    names: list[Name] = []
    tokens = list(pattern.finditer(text, start, end))
    if len(tokens) > 3 * MOST_WORDS:
        return None
    position = name_ends = 0
    last = ""
    while position < len(tokens):
        token = tokens[position]
        written, taken, content = token[0], 1, ""
        following = tokens[position + 1][0] if position + 1 < len(tokens) else ""
        if is_word := written.isalpha():
            word = written.lower()
        else:
            written = written.replace("’", "'")
            word = _ELISION.sub("", written.lower())
        if is_word and word not in _MEANT:  # as nearly all are, and nothing below is for them
            if word not in _STOP and (len(word) > 1 or written.isupper() or pattern is not _TOKEN):
                content = word
        elif (word[0].isdigit() or word in _MONTHS) and (date := _date(tokens, position, word)) is not None:
            form, taken = date
            values.append(Value("date", form, "", "", (token.start(), tokens[position + taken - 1].end())))
            key.append("#")
        elif word[0].isdigit() or word[0] in "-$€£" or word in _NUMERALS:
            value, taken = _value(tokens, position, word, following.lower(), last)
            values.append(value)
            key.append("#")
        elif (word in NEGATIONS or word.endswith("n't")) and written != "None":
            if not (word == "not" and following.lower() == "only"):
                negations.append(token.span())
        elif (positive := OPPOSITES.get(word)) is not None:
            negations.append(token.span())
            key.append(_stem(positive))
        elif word not in _STOP and (len(word) > 1 or not word.isalpha() or written.isupper() or pattern is not _TOKEN):
            content = word
        if content:
            stem = _stem(content)
            if _is_name(text, token, first=not key and not values):
                if position == name_ends and names:
                    names[-1] = Name((*names[-1].words, stem), (names[-1].span[0], token.end()))
                else:
                    names.append(Name((stem,), token.span()))
                name_ends = position + 1
            key.append(stem)
        last = word
        position += taken
    weight = len(set(key) - {"#"})
    if weight < 2 or len(key) > MOST_WORDS or not REFERENCES.isdisjoint(key):
        return None
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    if (
        names
        and len(tokens) > 1
        and names[0].span[0] == tokens[1].start()
        and key
        and text[tokens[0].start()].isupper()
    ):
        names.append(Name((key[0], *names[0].words), (tokens[0].start(), names[0].span[1])))  # perhaps a first name
    words = tuple(sorted(key))
    said = words, tuple(value[:3] for value in values), len(negations) % 2 == 1
    return Statement(words, weight, said, tuple(values), tuple(negations), tuple(names), (start, end))


def _stem(word: str) -> str:
    """The word without what English grammar adds most often. In other languages it is a word more or less alike."""
    if not word.endswith("s"):
        return word
    if word.endswith("'s"):
        word = word[:-2]
    if len(word) > 3 and word.endswith("s") and word[-2] not in "siu":
        return word[:-1]
    return word


REPLACED = frozenset({"#", *(_stem(word) for word in OPPOSITES.values())})
"""Words of a key that may stand for others in the text."""


def _is_name(text: str, token: re.Match[str], *, first: bool) -> bool:
    written = token[0]
    inner = written[1:]
    if not (written.isalpha() and inner.islower()) and (
        "_" in written or "." in inner or any(c.isupper() or c.isdigit() for c in inner)
    ):
        return True
    start = token.start()
    return (start > 0 and text[start - 1] in '`"*“‘') or (not first and written[0].isupper())


def _date(tokens: list[re.Match[str]], position: int, word: str) -> tuple[str, int] | None:
    """The date at this token, and how many tokens it takes: 2024-01-05, 5.1.2024, January 5, 2024, 5 January 2024."""
    if len(word) >= 6 and word[0].isdigit():
        if (iso := _ISO_DATE.match(word)) and 1000 <= int(iso[1]) <= 2999 and 1 <= int(iso[2]) <= 12:
            return f"{iso[1]}-{int(iso[2]):02}" + (f"-{int(iso[3]):02}" if iso[3] else ""), 1
        if day := _DAY_FIRST.match(word):
            return f"{day[3]}-{int(day[2]):02}-{int(day[1]):02}", 1
        return None
    following = [token[0].lower().removesuffix(".") for token in tokens[position + 1 : position + 3]]
    if (month := _MONTHS.get(word)) is not None and following:
        if _is_year(following[0]):
            return f"{following[0]}-{month}", 2
        day_of = _day(following[0])
        if day_of and len(following) > 1 and _is_year(following[1]):
            return f"{following[1]}-{month}-{day_of}", 3
        return (f"{month}-{day_of}", 2) if day_of else None
    if word[0].isdigit() and following and (month := _MONTHS.get(following[0])) is not None and (day_of := _day(word)):
        if len(following) > 1 and _is_year(following[1]):
            return f"{following[1]}-{month}-{day_of}", 3
        return f"{month}-{day_of}", 2
    return None


def _is_year(word: str) -> bool:
    return len(word) == 4 and word.isdecimal() and word[0] in "12"


def _day(word: str) -> str | None:
    digits = word[:-2] if word.endswith(("st", "nd", "rd", "th")) else word
    return f"{int(digits):02}" if digits.isdecimal() and len(digits) <= 2 and 1 <= int(digits) <= 31 else None


def _value(tokens: list[re.Match[str]], position: int, word: str, following: str, last: str) -> tuple[Value, int]:
    """The value at this token, with the currency before it or the unit after it, and how many tokens it takes."""
    start = tokens[position].start()
    taken, unit = 1, ""
    if word in ("$", "€", "£"):
        if not following[:1].isdigit():
            return Value("unit", word, "", "", tokens[position].span()), 1
        unit, word, taken = word, following, 2
        following = ""
    written = _PARTS_OF_NUMBER.match(word)
    digits, suffix = (written[1], written[2]) if written else ("", "")
    end = tokens[position + taken - 1].end()
    if (written and written[3]) or (suffix and suffix not in _UNITS):
        return Value("version" if "." in digits else "number", word, "", "", (start, end)), taken
    if last in _RELEASES or digits.count(".") > 1:
        return Value("version", digits, "", "", (start, end)), taken
    if not unit:
        unit = suffix
        if not unit and following in _UNITS and (len(following) > 1 or following in "%smhgdb"):
            unit, taken = following, taken + 1
            end = tokens[position + taken - 1].end()
    number = _NUMERALS.get(word)
    if number is None:
        try:
            number = float(_THOUSANDS.sub("", digits))
        except ValueError:
            return Value("number", digits, unit, "", (start, end)), taken
    if unit in _UNITS:
        dimension, factor = _UNITS[unit]
        return Value("unit", f"{number * factor:.9g}", dimension, f"{number:.12g}", (start, end)), taken
    return Value("number", f"{number:.12g}", "", "", (start, end)), taken
