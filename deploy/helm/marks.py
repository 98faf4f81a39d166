"""Writes objects as YAML in which marked places are expressions of Helm's templates.

A mark is a word that stands where a value, a key or an item of a list would stand. After the objects are written as
YAML, each mark is replaced by what it stands for; only then is its indentation known.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from deploy.helm.source import Object

_MARK = re.compile(r"MARK(\d{4})")


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
    """Items of lists are indented, and a text of several lines stays one."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dump(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
    return text


class Marks:
    """The marks of one template."""

    def __init__(self) -> None:
        self._inline: dict[str, str] = {}
        self._blocks: dict[str, str] = {}

    def value(self, expression: str) -> str:
        """A value of one line: what the expression prints, which has to quote it if need be."""
        return self._add(self._inline, f"{{{{ {expression} }}}}")

    def tree(self, expression: str) -> str:
        """A value that is a mapping or a list: the expression as YAML, below its key."""
        return self._add(self._inline, f"{{{{- toYaml {expression} | nindent INDENT }}}}")

    def lines(self, text: str) -> str:
        """The key of a mapping (with any value), or an item of a list, that becomes these lines: YAML and conditions,
        with
        ``HERE`` for their depth and ``INDENT`` for that of what is below a key."""
        return self._add(self._blocks, text)

    def _add(self, marks: dict[str, str], text: str) -> str:
        mark = f"MARK{len(self._inline) + len(self._blocks):04}"
        marks[mark] = text
        return mark

    def render(self, o: Object) -> str:
        """The object as YAML, with its marks replaced."""
        text = dump(o)
        assert "{{" not in text, "the manifest itself has what a template would read"
        return "".join(self._replaced(line) for line in text.splitlines(keepends=True))

    def _replaced(self, line: str) -> str:
        indent = line[: len(line) - len(line.lstrip())]
        match = re.fullmatch(r"\s*(?:- )?(MARK\d{4})(?:: null)?\n", line)
        if match and match[1] in self._blocks:
            lines = self._blocks[match[1]].splitlines()
            depths = {"HERE": str(len(indent)), "INDENT": str(len(indent) + 2)}
            return "".join(f"{indent}{re.sub('HERE|INDENT', lambda depth: depths[depth[0]], text)}\n" for text in lines)
        key = re.match(r"\s*(?:- )?", line)
        assert key is not None
        return _MARK.sub(lambda mark: self._inline[mark[0]].replace("INDENT", str(len(key[0]) + 2)), line)
