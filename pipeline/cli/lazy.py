"""Commands that are imported when they are called: nobody waits for the libraries of the others."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup
from typer.main import get_group

if TYPE_CHECKING:
    from typer._click import Command, Context  # Typer's own names for them are subclasses

COMMANDS: Mapping[str, str] = {
    "up": "stack:up",
    "down": "stack:down",
    "status": "status:status",
    "serve": "serve:serve",
    "mcp": "mcp:mcp",
    "ingest": "ingest:ingest",
    "watch": "ingest:watch",
    "search": "search:search",
    "ask": "ask:ask",
    "why": "why:why",
    "rebuild": "rebuild:rebuild",
    "recover": "recover:recover",
    "audit": "audit:audit",
    "plan": "plan:plan",
    "eval": "eval:evaluate",
    "dead": "dead:dead",
    "connector": "connector:connector",
    "extract": "extract:extract",
    "document": "withdraw:document",
    "tenant": "withdraw:tenant",
    "forget": "forget:forget",
    "export": "forget:export",
    "golden": "golden:golden",
    "generation": "generation:generation",
    "producer": "producer:producer",
    "trail": "trail:trail",
    "budget": "budget:budget",
}
"""By name: the module in ``pipeline.cli``, and in it a function, or a Typer with commands of its own."""


class Commands(TyperGroup):
    """Those that are registered, then these."""

    def list_commands(self, ctx: Context) -> list[str]:
        return [*dict.fromkeys([*super().list_commands(ctx), *COMMANDS])]

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name in COMMANDS:
            self._load(cmd_name)
        elif cmd_name not in self.commands:  # "Did you mean …?" looks at all of them
            for name in COMMANDS:
                self._load(name)
        return super().get_command(ctx, cmd_name)

    def _load(self, name: str) -> None:
        if name not in self.commands:
            module, _, attribute = COMMANDS[name].partition(":")
            made = getattr(import_module(f"pipeline.cli.{module}"), attribute)
            alone = typer.Typer(rich_markup_mode="rich")
            if isinstance(made, typer.Typer):
                alone.add_typer(made, name=name)
            else:
                alone.command(name)(made)
            self.commands.update(get_group(alone).commands)
