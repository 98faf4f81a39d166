"""The packages in ``sources.toml``, and the payloads in them.

A package is an archive of a registry; it is read in place, and nothing in it is unpacked or run. A group of a package
names the files to read, how payloads lie in them, and which reader of ``readers`` reads each of them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pipeline.core.errors import Misconfigured
from pipeline.runtime import settings

SOURCES = Path(__file__).with_name("sources.toml")
FETCH = "python -m tests.contract.payloads.fetch"


@dataclass(frozen=True, slots=True)
class Group:
    """Payloads of one kind in a package."""

    reader: str
    files: Sequence[str]
    """Patterns of paths in the archive, without its first folder."""
    exceptions: Mapping[str, str] = field(default_factory=dict)
    """Files that are left out, each with the reason."""
    form: Literal["text", "json", "literals", "replay"] = "text"
    """How payloads lie in a file: the file is one; it holds JSON; as literals in Python's source; as requests with
    their answers, eleven lines each (PyGithub)."""
    having: Sequence[str] = ()
    """The keys, and dotted paths of keys, that a literal must have to be a payload."""
    matching: str = ""
    """A regular expression that occurs in each text that is a payload, or in the request's path."""
    rows: str = ""
    """Where the payloads lie in JSON: keys, and ``*`` for each element of a list."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """The values of keys that a payload must have, or that lead to it (``rows``)."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """By name of a fact that the reader returns: what it must equal, with paths into the payload in braces."""
    refused: str = ""
    """The error that each payload of the group is read as."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the reader that the payload itself does not hold, such as the name of an event."""

    def has(self, path: str) -> bool:
        return path not in self.exceptions and any(fnmatchcase(path, pattern) for pattern in self.files)


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    registry: Literal["pypi", "npm"]
    version: str
    file: str
    """The file's name in the registry."""
    sha256: str
    licence: str
    owner: str
    """The owner of its repository, who publishes it."""
    groups: Sequence[Group]

    @property
    def archive(self) -> Path:
        return folder() / self.file


@dataclass(frozen=True, slots=True)
class Payload:
    id: str
    """Its file, and its place in it."""
    group: Group
    value: Any
    """JSON; text for XML and markup."""
    status: int = 200
    """The status of the answer."""

    @property
    def body(self) -> bytes:
        """The payload as an answer's body."""
        match self.value:
            case bytes():
                return self.value
            case str():
                return self.value.encode()
            case _:
                return json.dumps(self.value).encode()

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


def folder() -> Path:
    """Return the folder of the archives."""
    return settings.dist() / "payloads"


@cache
def packages() -> Mapping[str, Package]:
    """Return the packages by name."""
    rows = tomllib.loads(SOURCES.read_text("utf-8"))["packages"]
    return {row["name"]: Package(**{**row, "groups": [Group(**group) for group in row["groups"]]}) for row in rows}


def verify(package: Package) -> None:
    """Compare the package's archive with the recorded hash. Raises Misconfigured."""
    try:
        content = package.archive.read_bytes()
    except FileNotFoundError as error:
        raise Misconfigured(f"{package.file} is not in {folder()}: run `make test-servers`, or {FETCH}") from error
    if (actual := hashlib.sha256(content).hexdigest()) != package.sha256:
        package.archive.unlink()
        raise Misconfigured(
            f"{package.file} is not what was recorded (SHA-256 {actual[:16]}…, not {package.sha256[:16]}…) and was"
            f" removed: run {FETCH} again; if that does not help, do not use what this registry hands out"
        )


def payloads(package: Package) -> list[Payload]:
    """Return the package's payloads. Raises Misconfigured if its archive is missing or another."""
    verify(package)
    result = []
    with tarfile.open(package.archive) as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            groups = [group for group in package.groups if group.has(path)]
            if groups and (opened := archive.extractfile(member)) is not None:
                content = opened.read()
                for group in groups:
                    for place, value, status in _within(content, group):
                        result.append(Payload(f"{path}{place}", group, value, status))
    return result


def _within(content: bytes, group: Group) -> Iterator[tuple[str, Any, int]]:
    """Yield the payloads in a file: the place of each in it, its value, and its status."""
    match group.form:
        case "text":
            if re.search(group.matching, content.decode("utf-8", "replace")):
                yield "", content, 200
        case "json":
            for place, value in _rows(json.loads(content), group.rows.split("/") if group.rows else [], group.where):
                yield place, value, 200
        case "literals":
            for line, value in _literals(content, group):
                yield f":{line}", value, 200
        case "replay":
            yield from _replayed(content.decode(), group)


def _rows(value: Any, keys: Sequence[str], where: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and any(value.get(key, expected) != expected for key, expected in where.items()):
        return
    if not keys:
        yield "", value
    elif keys[0] == "*":
        for index, row in enumerate(value):
            yield from ((f"/{index}{place}", inner) for place, inner in _rows(row, keys[1:], where))
    else:
        yield from ((f"/{keys[0]}{place}", inner) for place, inner in _rows(value[keys[0]], keys[1:], where))


def _literals(content: bytes, group: Group) -> Iterator[tuple[int, Any]]:
    """Yield the outermost literals in Python's source that are payloads, with their lines."""
    text = content.decode("utf-8", "replace")
    if re.search(group.matching, text) and all(path.partition(".")[0] in text for path in group.having):
        yield from _literals_in(ast.parse(content), group)


def _literals_in(node: ast.AST, group: Group) -> Iterator[tuple[int, Any]]:
    if isinstance(node, ast.JoinedStr):  # its parts are none
        return
    if isinstance(node, ast.Constant if group.matching else ast.Dict) and _is_payload(value := _value(node), group):
        yield node.lineno, value
        return
    for child in ast.iter_child_nodes(node):
        yield from _literals_in(child, group)


def _value(node: ast.AST) -> Any:
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except ValueError:  # it has a part that is computed
        return None


def _is_payload(value: Any, group: Group) -> bool:
    if group.matching:
        return isinstance(value, str) and bool(re.search(group.matching, value))
    if not isinstance(value, dict) or any(_at(value, path) is None for path in group.having):
        return False
    return all(value.get(key) == expected for key, expected in group.where.items())


def _replayed(text: str, group: Group) -> Iterator[tuple[str, Any, int]]:
    lines = text.split("\n")
    for start in range(0, len(lines) - 10, 11):
        _, verb, _, _, path, _, sent, status, _, answer = lines[start : start + 10]
        if re.search(group.matching, f"{status} {verb} {path} {sent}"):
            yield f":{start + 1}", json.loads(answer), int(status)


def expected(template: str, value: Any) -> str:
    """Return the template with the payload's own values."""
    return re.sub(r"\{([^{}]*)\}", lambda match: str(_at(value, match[1])), template)


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
