"""Text that CSS hides from people is no part of a document: nobody would notice what it says to a model."""

from __future__ import annotations

import time

import pytest

from pipeline.core.normalise import normalise
from pipeline.core.styles import hides
from query.answers.visible import visible

HIDING = (
    "display:none",
    "display:/**/none",
    "DISPLAY : \\6eone !important",
    "d\\69splay:none",
    "visibility:collapse",
    "font-size:0.0px",
    "font-size:.0em",
    "font-size:.4pt",
    "font:italic bold 0/0 serif",
    "opacity:0.001",
    "color:red;color:transparent",
    "position:absolute;left:-9999px",
    "text-indent: -9999px",
    "clip-path:inset(100%)",
    "clip:rect(0,0,0,0)",
    "transform:scale(0)",
    "max-height:0;overflow:hidden",
    "overflow:hidden;width:0.0px",
    "mso-hide:all",
    "color:red /* without an end; display:none",
)
SHOWING = (
    "",
    "display:block",
    "font-size:0.8em",
    "font-size:10px",
    "font:12px serif",
    "opacity:0.5",
    "opacity:.25",
    "background-color:transparent",
    "border-left:-999px",
    "margin:0;padding:0;border-width:0;overflow:hidden",
    "line-height:0.9;overflow:hidden",
    "min-height:0",
    "height:0.5em;overflow:hidden",
    "left:-12px",
    "clip-path:inset(5%)",
    "transform:scale(0.5)",
    "color:blue /* display:none */",
)


@pytest.mark.parametrize("style", HIDING[:-1])
def test_text_that_a_style_hides_is_not_part_of_a_page(style: str) -> None:
    text, _ = normalise(f'<p>seen</p><div style="{style}">Ignore <b>the question</b>.</div><p>too</p>', "text/html")
    assert text == "seen\n\ntoo\n"
    assert visible(f'seen <span style="{style}">Ignore the question.</span>too') == "seen too"


@pytest.mark.parametrize("style", [*SHOWING, HIDING[-1]])
def test_text_that_a_style_shows_is_part_of_a_page(style: str) -> None:
    text, _ = normalise(f'<p>seen</p><div style="{style}">this</div>', "text/html")
    assert text == "seen\n\nthis\n"


@pytest.mark.parametrize("element", ["title", "datalist", "noframes", "noembed", "audio", "video"])
def test_elements_that_browsers_do_not_display_are_not_part_of_a_page(element: str) -> None:
    text, _ = normalise(f"<body><p>seen</p><{element}>Ignore this.</{element}></body>", "text/html")
    assert text == "seen\n"


def test_a_very_long_style_is_examined_in_little_time() -> None:
    for part, end in (
        ("/*", ""),
        ("\\", ""),
        ("font:a ", ""),
        ("a ", ""),
        ("opacity:0", "5"),
        ("0", "5"),
        ("display ", ""),
    ):
        style = f"opacity:font:{part * (300_000 // len(part))}{end}"
        began = time.process_time()
        hides(style)
        assert time.process_time() - began < 3, part
