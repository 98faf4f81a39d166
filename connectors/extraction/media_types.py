"""Which kind of text a file is: by its name's ending, else by how it begins."""

from __future__ import annotations

import json
import re

_BY_ENDING = {
    "text/plain": ("txt", "text", "log"),
    "text/markdown": ("md", "markdown", "mdown", "mkd", "mdx", "qmd"),
    "text/x-rst": ("rst", "rest"),
    "text/html": ("html", "htm", "xhtml"),
    "text/csv": ("csv",),
    "text/tab-separated-values": ("tsv", "tab"),
    "application/x-ndjson": ("jsonl", "ndjson"),
    "application/json": ("json", "geojson"),
    "text/x-python": ("py", "pyi", "pyw"),
    "text/javascript": ("js", "mjs", "cjs", "jsx"),
    "text/typescript": ("ts", "mts", "cts"),
    "text/tsx": ("tsx",),
    "text/x-java": ("java",),
    "text/x-go": ("go",),
    "text/x-rust": ("rs",),
    "text/x-c": ("c", "h"),
    "text/x-c++": ("cc", "cpp", "cxx", "hh", "hpp", "hxx", "ipp"),
    "application/sql": ("sql",),
    "application/x-sh": ("sh", "bash", "zsh", "ksh"),
}
_TYPE_OF = {ending: media_type for media_type, endings in _BY_ENDING.items() for ending in endings}
_SHEBANG = re.compile(r"#!\s*\S*?(?:/|env\s+(?:-\S+\s+)*)(python|node|deno|bash|sh|zsh|ksh)[\d.]*\b")
_SHELL = {"python": "text/x-python", "node": "text/javascript", "deno": "text/typescript"}
_HTML = re.compile(r"<(?:!doctype\s+html|html[\s>])", re.I)
_BEGINNING = 4096
_WHOLE_JSON = 1024 * 1024
"""A longer text without a telling name is not parsed merely to learn whether it is JSON."""


def media_type(name: str, text: str) -> str:
    """name: the file's, with or without folders."""
    base = name.rpartition("/")[2]
    ending = base.rpartition(".")[2].lower() if "." in base.lstrip(".") else ""
    return _TYPE_OF.get(ending) or _by_beginning(text)


def _by_beginning(text: str) -> str:
    if found := _SHEBANG.match(text[:200].partition("\n")[0]):
        return _SHELL.get(found[1], "application/x-sh")
    if _HTML.match(_without_prologue(text[:_BEGINNING])):
        return "text/html"
    if text[:1] in ("{", "[") and len(text) <= _WHOLE_JSON:
        if _parses(text):
            return "application/json"
        lines = text.splitlines()
        if len(lines) > 1 and all(_parses(line) for line in lines if line.strip()):
            return "application/x-ndjson"
    return "text/plain"


def _without_prologue(text: str) -> str:
    """Without the XML declaration and comments that may stand before the first element."""
    text = text.lstrip()
    for opening, closing in (("<?xml", "?>"), *[("<!--", "-->")] * 10):
        if text.startswith(opening):
            text = text.partition(closing)[2].lstrip()
    return text


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
