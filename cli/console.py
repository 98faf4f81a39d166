"""A console on which no text can control the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from cli.terminal import harmless


class SafeConsole(Console):
    """Replaces control characters in what it prints: names, titles and errors come from others."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of an argument of ``print``, or of a table's cell."""
        return super().render_str(harmless(text), **options)
