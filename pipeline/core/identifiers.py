"""Names that must be found exactly: ``PROJ-4821``, ``ERR_CONN_RESET``, ``0x80070057``, ``src/app/main.py``, ``v2.3.1``.

Analyzers tear them apart or stem them, and a model has never seen them. So they are recognised here, by the same rules
in a chunk (when its keyword entry is made) and in a question, and compared as they are, in lower case. Nothing depends
on what analysis a server offers. What the rules take for an identifier by mistake ("and/or/not") costs a term.
"""

from __future__ import annotations

import re
from functools import lru_cache

LONGEST = 200
"""Characters. Longer ones are base64, not names."""
MOST_TERMS = 2_000
"""The most terms of one text; a text of more is a listing that nobody looks up line by line."""
MOST_CACHED_WORDS = 10_000
"""Words that were taken apart: the same quoted or hyphenated ones come again and again."""

_APART = re.compile(r"""[\s"'`´“”„‘’«»(){}\[\]<>,;|=*!?&…]+|(?<!:):(?!:)|:?//""")
_RIM = ".:-_/%+^$~"
_STOPS = ".,;:!?)\"'"
_PLAIN = re.compile(r"[^\W\d_]+")
_FILE = r"\.?[\w-]{2,}(?:\.[\w-]+)*\.[^\W\d_][^\W_]{0,9}"
_KINDS = re.compile(
    "|".join(
        (
            r"0[xX][0-9a-fA-F]{2,}",
            r"(?=\w*\d)(?=\w*[a-fA-F])[0-9a-fA-F]{7,64}",  # an abbreviated or a whole hash
            r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
            r"[A-Z][A-Z0-9]+-\d+(?:[-.]\w+)*",  # a ticket
            r"[^\W\d_]{2,}-\d{3,}(?:[-.]\w+)*",  # … or an error code, in small letters
            r"[\w.$-]*[^\W_]_+[^\W_](?:[\w.$-]*\w)?",  # snake_case
            r"[vV]\d+(?:\.\d+)+(?:[-+.]\w+)*",
            r"\d+(?:\.\d+){2,}(?:[-+.]\w+)*",  # a version, an address
            _FILE,
            r"\.[^\W\d_][\w-]{2,}",  # .gitignore
            r"\w+(?:::\w+)+",
            r"--[^\W_][\w-]+",  # an option
            r"#\d{2,}",
            r"[^\W\d_]+\d{3,}[^\W_]*",  # KB5034441
            r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
        )
    )
)
_FILE_NAME = re.compile(_FILE)
_SEGMENT = re.compile(r"[\w.@+~%-]+")
PART = re.compile(r"[^\W_]{2,}")
"""A word that names are made of."""
_UNDIVIDED = re.compile(r"\w+(?:\.\w+)*")
"""Words and names that analyzers leave whole."""
_JOINT = re.compile(r"[._]+|(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where the words of a name meet."""


def identifiers(text: str) -> tuple[str, ...]:
    """The identifiers of a text, whole, in lower case, in their order, each once."""
    names: dict[str, None] = {}
    for word in text.split():
        if word.rstrip(_STOPS).isalpha():
            continue  # most are: taking them apart costs ten times as much as seeing that
        names.update(dict.fromkeys((_in_short if len(word) <= LONGEST else _in_word)(word)))
    return tuple(names)


def _in_word(word: str) -> tuple[str, ...]:
    pieces = (piece for piece in _APART.split(word) if piece and len(piece) <= LONGEST)
    return tuple(name for piece in pieces if not _PLAIN.fullmatch(piece) and (name := _recognised(piece)))


_in_short = lru_cache(MOST_CACHED_WORDS)(_in_word)


def terms(text: str) -> list[str]:
    """The terms that match a text: its identifiers whole, the ends of its paths (``app/main.py``, ``main.py``), and
    the words they are made of. Sorted, at most MOST_TERMS."""
    whole = identifiers(text)
    result = set(whole)
    for name in whole:
        if len(result) >= MOST_TERMS:
            break
        result.update(_ends(name))
        result.update(PART.findall(name))
    return sorted(result)[:MOST_TERMS]


def words_of_names(text: str) -> str:
    """The words of the names in a text that an analyzer leaves whole, in lower case, in their order: of ``read_text``,
    ``ArgumentParser``, ``json.dumps`` and ``Budget_2026.xlsx``. Names of one word and numbers have none; at most
    MOST_TERMS."""
    words: list[str] = []
    for name in _UNDIVIDED.findall(text):
        parts = [part for part in _JOINT.split(name) if part]
        if len(parts) > 1 and any(map(str.isalpha, parts)):
            words += (part.lower() for part in parts if len(part) > 1)
    return " ".join(words[:MOST_TERMS])


def exact_names(text: str) -> set[str]:
    """The identifiers that a text holds exactly, and the ends of its paths."""
    whole = identifiers(text)
    return {*whole, *(end for name in whole for end in _ends(name))}


def _recognised(piece: str) -> str | None:
    if _KINDS.fullmatch(piece):
        return piece.lower()
    name = piece.replace("\\", "/").rstrip(_RIM).lstrip("-:%+^$")
    rooted = name.startswith(("/", "~/", "./", "../"))
    name = name.lstrip("~./") if rooted else name
    if "/" in name:
        return name.lower() if _is_path(name, rooted=rooted) else None
    name = name.lstrip("_")
    return name.lower() if not name.isalpha() and _KINDS.fullmatch(name) else None


def _is_path(name: str, *, rooted: bool) -> bool:
    segments = name.split("/")
    if not all(_SEGMENT.fullmatch(segment) for segment in segments) or not re.search(r"[^\W\d_]", name):
        return False
    return rooted or len(segments) > 2 or bool(_FILE_NAME.fullmatch(segments[-1]))


def _ends(name: str) -> list[str]:
    """The ends of a path that still are names, when folders are taken from its front; a version without its v."""
    if re.match(r"v\d+\.\d", name):
        return [name[1:]]
    segments = name.split("/")
    ends = ["/".join(segments[n:]) for n in range(1, len(segments))]
    return [end for end in ends if "/" in end or _KINDS.fullmatch(end) or _KINDS.fullmatch(end.upper())]
