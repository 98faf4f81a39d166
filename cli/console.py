"""A console on which no text can control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from cli.terminal import harmless


class SafeConsole(Console):
    """Replaces control characters in what it prints: names, titles and errors come from others."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of an argument of ``print``, or of a table's cell."""
        return super().render_str(harmless(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything else, such as a ``Text``. What rich itself says to the terminal stays."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))
