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
    "max-height:0;max-width:0;min-height:0;padding-top:0;overflow:hidden;text-overflow:ellipsis",
    "mso-hide:all",
    "left:-999px;position:absolute",
    "left:-100em;position:absolute",
    "clip:rect(1px, 1px, 1px, 1px)",
    "content-visibility:hidden",
    "background:url(/*);display:none",
    "font-family:'/*';display:none",
    "font-size:0;font-size:smaller",
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
    "margin-left:108.0pt;text-indent:-108.0pt",
    "position:absolute;left:50%;width:600px;margin-left:-300px",
    "float:left;width:200px;margin-left:-100%",
    "position:absolute;clip:rect(0px,60px,200px,0px)",
    "backface-visibility:hidden",
    "--tw-bg-opacity:0;color:red",
    "background:linear-gradient(red,blue);-webkit-background-clip:text;color:transparent",
    "max-width:0;overflow:hidden;text-overflow:ellipsis",
    "position:relative;height:0;padding-bottom:56.25%;overflow:hidden",
    "width:0;flex:1;overflow:hidden",
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


@pytest.mark.parametrize("more", ["", "<b></b>" * 50_001])
def test_letters_that_are_larger_than_none_around_them_are_part_of_a_page(more: str) -> None:
    """As programs write newsletters: a size of nothing removes the gaps between columns, and each text has its own."""
    page = (
        '<div style="font-size:0px;padding:20px 0">gap<div style="font-size:0">gap'
        '<div style="font-family:Arial;font-size:20px">seen <b>this</b> <i style="font-size:0">not</i></div>gap'
        '<div style="font:bold 12px serif">and</div><p style="font-size:2em">gap</p></div>gap</div>too' + more
    )
    text, _ = normalise(page, "text/html")
    assert " ".join(text.replace("*", "").split()) == "seen this and too"


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
        ("font:", ""),
        ("font-size:1", ""),
        ("clip:rect(0 ", ""),
        ("'/*", ""),
    ):
        style = f"opacity:font:{part * (300_000 // len(part))}{end}"
        began = time.process_time()
        hides(style)
        assert time.process_time() - began < 3, part
