"""Reference of the ``penstock`` command, from its declarations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from typer._click import Context
from typer.core import TyperArgument, TyperGroup
from typer.main import get_group

from cli.main import NEEDS, app
from docs.site.markdown import code, prose, table

if TYPE_CHECKING:
    from typer._click import Command


def document() -> str:
    root = get_group(app)
    context = Context(root, info_name="penstock")
    parts: list[str] = []
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        assert command is not None
        parts += _command(f"penstock {name}", command, level=2)
        if extras := NEEDS.get(name):
            parts.append(f"Needs `pip install 'penstock[{','.join(extras)}]'`.\n\n")
        for path, inner in _inner(f"penstock {name}", command):
            parts += _command(path, inner, level=3)
    return "".join(parts)


def _inner(path: str, command: Command) -> Iterator[tuple[str, Command]]:
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield f"{path} {name}", inner
            yield from _inner(f"{path} {name}", inner)


def _command(path: str, command: Command, level: int) -> list[str]:
    described, examples = _split(command.help or "")
    shown: list[Any] = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in shown if isinstance(parameter, TyperArgument)]
    options = [parameter for parameter in shown if not isinstance(parameter, TyperArgument)]
    usage = " ".join([path, *map(_usage, arguments), *(["[OPTIONS]"] if options else [])])
    parts = [f"{'#' * level} {path}\n\n", f"{prose(described)}\n\n"]
    if not isinstance(command, TyperGroup):
        parts.append(f"```text\n{usage}\n```\n\n")
    rows = [(_names(parameter), _default(parameter), prose(parameter.help or "")) for parameter in shown]
    parts.append(table(("argument or option", "default", "meaning"), rows))
    if examples:
        parts.append("```console\n" + "".join(f"$ {example}\n" for example in examples) + "```\n\n")
    return parts


def _split(text: str) -> tuple[str, list[str]]:
    """The description, and the commands of its paragraphs that begin with “Example:”."""
    described, examples = [], []
    for paragraph in text.split("\n\n"):
        label, colon, rest = paragraph.strip().partition(":")
        if colon and label in ("Example", "Examples"):
            examples += [line.strip() for line in rest.splitlines() if line.strip()]
        else:
            described.append(paragraph)
    return "\n\n".join(described), examples


def _usage(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper()
    name += " …" if argument.nargs != 1 else ""
    return name if argument.required else f"[{name}]"


def _names(parameter: Any) -> str:
    if isinstance(parameter, TyperArgument):
        return code((parameter.metavar or parameter.name).upper())
    names = ", ".join(map(code, parameter.opts))
    if parameter.secondary_opts:
        return f"{names} / {', '.join(map(code, parameter.secondary_opts))}"
    return names if parameter.is_flag else f"{names} {code(parameter.metavar or _type(parameter))}"


def _type(parameter: Any) -> str:
    annotation = parameter.type_descriptor.annotation
    choices = [choice for choice in getattr(annotation, "__args__", ()) if isinstance(choice, str)]
    if choices:
        return "|".join(choices)
    [inner, *_] = getattr(annotation, "__args__", (annotation,))
    name = str(inner.__name__)
    return {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "Path": "FILE"}.get(name, name.upper())


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, False, (), []) or callable(parameter.default):
        return ""
    return code(str(parameter.default))
