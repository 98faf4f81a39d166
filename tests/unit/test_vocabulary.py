"""Names and docstrings use the glossary of CONTRIBUTING.md: standard terms, and full sentences."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import pytest

from pipeline.observability.events import LOG_EVENTS

ROOT = Path(__file__).parents[2]
PRODUCT = ("penstock", "topics", "pipeline", "connectors", "query", "canary", "cli", "deploy")

REPLACED = {
    "told": "response, report or summary",
    "asked": "request or question",
    "found": "results, rows, matches or violations",
    "beside": "concurrent, alongside or non-active",
    "kept": "cached, retained or stored",
    "given": "arguments, options or values",
    "wanted": "desired or expected",
    "those": "a noun",
    "whoever": "a noun",
    "mend": "repair",
    "mended": "repaired",
    "mender": "a noun with repair",
    "doubted": "in doubt, or a noun",
    "bury": "write a dead letter",
    "buried": "dead-lettered",
    "puppet": "harness",
    "tether": "connection or pool",
}
"""Words that no name may consist of or contain between underscores, and what to write instead."""
WORDS_OF_TESTS = frozenset({"beside", "given", "kept"})
"""Replaced words that names in tests may still consist of or contain."""
CONTRACT_NAMES = frozenset({"asked_at"})
"""Names of the wire, of tables and of HTTP, which cannot change."""
LOOP_VARIABLES = frozenset({"one", "it", "each"})
DOCSTRING_STARTS = re.compile(r"(?:Of|Who|Whoever|What|Which|Whether it)\b|…")


def _loop_variables(node: ast.AST) -> Iterator[ast.Name]:
    """The names that a loop or a comprehension binds."""
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield from (name for name in ast.walk(node.target) if isinstance(name, ast.Name))


def _name(node: ast.AST) -> str | None:
    """The name that this node defines, if it defines one."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.arg(arg=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
    return None


@cache
def _words(name: str) -> frozenset[str]:
    """The words of a name in snake_case, UPPER_CASE or CamelCase, in lower case."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name))


def violations(source: str, allowed: Set[str] = frozenset()) -> list[str]:
    """One line for each name or docstring of a module that does not follow the glossary. allowed: replaced words that
    its names may contain, except those of tests."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        name = _name(node)
        if name is not None and name not in CONTRACT_NAMES:
            replaced = _words(name) & REPLACED.keys() - (frozenset() if name.startswith("test_") else allowed)
            lines += [f"{node.lineno}: {name}: say {REPLACED[word]}" for word in sorted(replaced)]  # type: ignore[attr-defined]
        lines += [
            f"{variable.lineno}: loop variable {variable.id}: name what it holds"
            for variable in _loop_variables(node)
            if variable.id in LOOP_VARIABLES
        ]
        # Docstrings of modules, classes, functions and constants: every string that stands alone.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = node.value.value.strip()
            if DOCSTRING_STARTS.match(text) or text.endswith("…"):
                lines.append(f"{node.lineno}: docstring is no full sentence: {text[:40]!r}")
    if "# fmt: skip" in source:
        lines.append("# fmt: skip: let ruff format it")
    return lines


def modules() -> list[Path]:
    return sorted(module for package in (*PRODUCT, "bench") for module in (ROOT / package).rglob("*.py"))


def test_names_and_docstrings_follow_the_glossary() -> None:
    assert [
        f"{module.relative_to(ROOT)}:{line}" for module in modules() for line in violations(module.read_text())
    ] == []


def test_names_and_docstrings_in_tests_follow_the_glossary() -> None:
    assert [
        f"{module.relative_to(ROOT)}:{line}"
        for module in sorted((ROOT / "tests").rglob("*.py"))
        if module != Path(__file__)
        for line in violations(module.read_text(), WORDS_OF_TESTS)
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "told = 1",
        "def asked() -> None: ...",
        "class SearchAsked: ...",
        "def search(told_at: int) -> None: ...",
        "class Mender: ...",
        "doubted = 1",
        "FOUND_AT = 1",
        "for one in (1, 2): pass",
        "x = [one for one in (1, 2)]",
        '"""Of a document."""',
        'LIMIT = 3\n"""… and how many of them."""',
        'def f() -> None:\n    """Whoever asks."""',
        "x = (1,)  # fmt: skip",
    ],
)
def test_old_vocabulary_is_reported(source: str) -> None:
    assert violations(source)


def test_words_that_tests_may_use_are_reported_in_their_names() -> None:
    assert violations("kept = 1", WORDS_OF_TESTS) == []
    assert violations("def test_it_is_kept() -> None: ...", WORDS_OF_TESTS)


@pytest.mark.parametrize(
    "source",
    [
        "foundation = 1",
        "for document in (1, 2): pass",
        '"""The office of a document."""',
        "class SearchRequest: ...",
        "phone = tone = 1",
        "in_doubt_since = 1",
    ],
)
def test_standard_vocabulary_is_accepted(source: str) -> None:
    assert violations(source) == []


LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
LOGGERS = frozenset({"log", "_log"})


def log_events(source: str) -> Iterator[tuple[int, str]]:
    """The events of a module's calls ``log.<level>("event", …)``, with their lines. An event that is no literal comes
    as its source, which is no event."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=logger), attr=method), args=[event, *_]) if (
                logger in LOGGERS and method in LOG_METHODS
            ):
                choices = [event.body, event.orelse] if isinstance(event, ast.IfExp) else [event]
                for choice in choices:
                    is_text = isinstance(choice, ast.Constant) and isinstance(choice.value, str)
                    yield node.lineno, choice.value if is_text else ast.unparse(choice)  # type: ignore[attr-defined]


def test_log_events_are_declared_and_used() -> None:
    used: set[str] = set()
    undeclared = []
    for module in sorted(path for package in PRODUCT for path in (ROOT / package).rglob("*.py")):
        source = module.read_text()
        for line, event in log_events(source) if "log." in source else ():
            used.add(event)
            if event not in LOG_EVENTS:
                undeclared.append(f"{module.relative_to(ROOT)}:{line}: {event}: declare it in observability/events.py")
    assert undeclared == []
    assert sorted(LOG_EVENTS - used) == []


def test_log_events_are_noun_and_verb() -> None:
    assert [event for event in sorted(LOG_EVENTS) if not re.fullmatch(r"[a-z]+(?:_[a-z]+)+", event)] == []


def test_log_calls_are_recognised() -> None:
    source = """log.info("serving")\n_log.error("a" if x else "b", n=1)\nlog.warning(f"{x}")\nmath.log("c")\n"""
    assert [event for _, event in log_events(source)] == ["serving", "a", "b", "f'{x}'"]
