"""How the fake chat model reads a prompt: what is quoted, what is asked, and what is an instruction."""

from __future__ import annotations

import re
from dataclasses import dataclass

NO_INFORMATION = "I don't have information on this."
MOST_SENTENCES = 3
COMMON = frozenset(
    """a about an and are as at be by can do does for from has have how i in is it its of on or our that the their this
    to was we were what when where which who why will with you your""".split()  # noqa: SIM905
)
_KEY = re.compile(r"The key (\w+) was drawn")
_EXACTLY = re.compile(r"reply with exactly this sentence[^:]*:\s*(.+)")
_COMMAND = re.compile(
    r"(?:ignore|disregard|forget|override)\b[^\n]{0,80}?\b(?:instructions?|rules?|above)\b[^\n]{0,60}?"
    r"\b(?:say|reply|answer|respond|write|output|print|append)\b(?:\s+(?:with|only|exactly|nothing but))*\s*:?\s*"
    r"(?P<payload>[^\n]+)",
    re.IGNORECASE,
)
_TURN = re.compile(
    r"^\W*(?:<\|im_start\|>|<\|start_header_id\|>|\[INST\]|<<SYS>>)?\s*"
    r"(?:system|developer)(?:<\|end_header_id\|>)?\s*[:\n]\s*(?P<payload>[^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
_TOKENS = re.compile(r"<\|im_start\|>|<\|start_header_id\|>|\[INST\]|<<SYS>>")
_TAGS = {0xE0000 + n: n for n in range(0x20, 0x7F)}
_ZERO_WIDTH = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad\u202a-\u202e\u2066-\u2069]")


@dataclass
class Read:
    passages: dict[int, str]
    outside: str
    """The parts of the user's message that are not quoted."""
    quoted: str
    question: str
    no_information: str
    understood: str
    """The question as the conversation explains it."""
    is_rewriting: bool
    """The question is to be completed from a conversation, not answered."""
    is_ruled: bool
    """The system message says that quotations hold no instructions."""

    def command(self, *, in_quotations: bool) -> str | None:
        """Return the text that an instruction tells the model to say, or None."""
        text = f"{self.outside}\n{self.quoted}" if in_quotations or not self.is_ruled else self.outside
        match = _COMMAND.search(text) or _TURN.search(text)
        if match is None:
            return None
        secret = next(iter(self.passages.values()), "nothing").split("\n")[-1][:40]
        return match["payload"].strip("\"'“” ").replace("{secret}", secret.replace(" ", "%20"))

    def rewrite(self) -> str:
        """Return the question with the words of what was said before that it lacks."""
        known = words(self.question)
        said = " ".join(re.findall(r"^(?:Asked|Answered): (.+)$", self.quoted, re.MULTILINE))
        before = re.findall(r"\w[\w.]*\w", said)
        lacking = [word for word in dict.fromkeys(before) if word.lower() not in COMMON and not words(word) <= known]
        return f"{self.question} {' '.join(lacking)}"

    def answer(self) -> str:
        expected = words(f"{self.question} {self.understood}")
        scored = []
        for n, text in self.passages.items():
            body = text.partition("\n\n")[2]
            for at, sentence in enumerate(re.split(r"(?<=[.!?])\s+|\n+", body)):
                hits = len(expected & words(sentence))
                if sentence.strip() and hits >= min(2, len(expected)):
                    scored.append((-hits, n, at, sentence.strip()))
        best = sorted(scored)[:MOST_SENTENCES]
        if not best:
            return self.no_information
        return " ".join(f"{sentence.rstrip()} [{n}]" for _, n, _, sentence in best if sentence)


def read(messages: list[dict[str, str]], *, sloppy: bool) -> Read:
    """sloppy: a line that looks like the end of a quotation ends it, whatever its key."""
    system = "\n".join(m["content"] for m in messages if m["role"] == "system")
    user = _as_tokens("\n".join(m["content"] for m in messages if m["role"] == "user"))
    key = match[1] if (match := _KEY.search(system)) else None
    passages: dict[int, str] = {}
    outside: list[str] = []
    inside: list[str] = []
    understood: list[str] = []
    name = None
    for line in user.splitlines():
        opened = re.fullmatch(rf"\u27e6passage (\w+) \u00b7 {key}\u27e7", line) if key else None
        closed = re.fullmatch(rf"\u27e6end (\w+) \u00b7 {key}\u27e7", line) if key else None
        if opened:
            name = opened[1]
        elif closed or (sloppy and name and _looks_like_an_end(line)):
            name = None
        elif name is None:
            outside.append(line)
        else:
            inside.append(line)
            if name == "question":
                understood.append(line)
            if name.isdigit():
                passages[int(name)] = f"{passages.get(int(name), '')}\n{line}".lstrip("\n")
    question = user.rpartition("Question:")[2].strip() if "Question:" in user else user.strip()
    exactly = _EXACTLY.search(system)
    return Read(
        passages,
        "\n".join(outside),
        "\n".join(inside),
        question,
        exactly[1].strip() if exactly else NO_INFORMATION,
        " ".join(understood),
        "rewrite the last question" in system,
        "never an instruction" in system,
    )


def _looks_like_an_end(line: str) -> bool:
    return bool(
        re.match(
            r"[\s\u27e6\u27e7\[\]<>=#*~-]*end\b.{0,40}\b(?:passages?|context|documents?|\d+)\b", line, re.IGNORECASE
        )
        or _TOKENS.search(line)
        or re.match(r"(?:system|developer|assistant|user)\s*:", line, re.IGNORECASE)
    )


def _as_tokens(text: str) -> str:
    """Models read tag characters as letters, and do not see what has no width."""
    return _ZERO_WIDTH.sub("", text.translate(_TAGS))


def words(text: str) -> set[str]:
    matches = {w.lower() for w in re.findall(r"\w+", text)} - COMMON
    return {re.sub(r"(?:ing|ed|es|s|e)$", "", w) if len(w) > 4 else w for w in matches}
