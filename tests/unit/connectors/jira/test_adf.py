"""Documents of Jira Cloud as Markdown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.confluence.markup import markdown
from connectors.jira import adf


def doc(*content: Any) -> dict[str, Any]:
    return {"type": "doc", "version": 1, "content": list(content)}


def text(value: str, *marks: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **({"marks": list(marks)} if marks else {})}


def paragraph(*content: Any) -> dict[str, Any]:
    return {"type": "paragraph", "content": list(content)}


def node(kind: str, *content: Any, **attributes: Any) -> dict[str, Any]:
    return {"type": kind, "attrs": attributes, "content": list(content)}


def converted(*content: Any) -> str:
    return markdown(adf.storage(doc(*content)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (node("heading", text("Steps"), level=2), "## Steps"),
        (paragraph(text("a "), text("b", {"type": "strong"}), text(" & <c>")), "a **b** & <c>"),
        (
            paragraph(text("see", {"type": "link", "attrs": {"href": "https://a.example/x"}})),
            "[see](https://a.example/x)",
        ),
        (paragraph(text("x", {"type": "link", "attrs": {"href": "javascript:alert(1)"}})), "x"),
        (paragraph(text("run", {"type": "code"})), "`run`"),
        (node("codeBlock", text("if a < b:\n    go()"), language="python"), "```python\nif a < b:\n    go()\n```"),
        (
            node("bulletList", node("listItem", paragraph(text("one"))), node("listItem", paragraph(text("two")))),
            "- one\n- two",
        ),
        (node("orderedList", node("listItem", paragraph(text("one")))), "1. one"),
        (
            node(
                "taskList", node("taskItem", text("done"), state="DONE"), node("taskItem", text("open"), state="TODO")
            ),
            "- [x] done\n- [ ] open",
        ),
        (node("panel", paragraph(text("Careful.")), panelType="warning"), "**Warning**\n\nCareful."),
        (node("expand", paragraph(text("Inside.")), title="More"), "**More**\n\nInside."),
        (node("blockquote", paragraph(text("Said."))), "> Said."),
        (paragraph(node("mention", id="1", text="@Ann Lee"), text(" knows")), "@Ann Lee knows"),
        (paragraph(node("mention", id="1")), "@unknown"),
        (paragraph(node("emoji", shortName=":tada:", text="🎉"), node("status", text="DONE")), "🎉DONE"),
        (paragraph(node("date", timestamp="1772323200000")), "2026-03-01"),
        (paragraph(node("date", timestamp="soon"), text("x")), "x"),
        (paragraph(node("inlineCard", url="https://a.example/1")), "[https://a.example/1](https://a.example/1)"),
        (node("mediaSingle", node("media", type="file", id="u", alt="error.log")), "error.log"),
        (paragraph(text("a"), {"type": "hardBreak"}, text("b")), "a\nb"),
        (node("newNode", paragraph(text("kept"))), "kept"),
    ],
)
def test_nodes(content: Any, expected: str) -> None:
    assert converted(content) == expected


def test_a_table_with_merged_cells_is_a_full_grid() -> None:
    table = node(
        "table",
        node("tableRow", node("tableHeader", paragraph(text("Host"))), node("tableHeader", paragraph(text("Port")))),
        node("tableRow", node("tableCell", paragraph(text("both")), colspan=2)),
    )
    assert converted(table).splitlines() == ["| Host | Port |", "| --- | --- |", "| both | both |"]


@pytest.mark.parametrize("document", [None, "text", 3, [], {}, {"type": "doc", "content": "x"}, doc(None, 3, "x")])
def test_what_is_no_document_has_no_text(document: Any) -> None:
    assert markdown(adf.storage(document)) == ""


def test_a_deeply_nested_document_keeps_its_text() -> None:
    inner: dict[str, Any] = paragraph(text("deep"))
    for _ in range(900):
        inner = node("blockquote", inner)
    assert "deep" in converted(inner)


def test_a_text_of_very_many_marks_is_not_put_together_for_each_of_them() -> None:
    """A hundred thousand marks of one text were hundreds of gigabytes of copies."""
    mark = {"type": "link", "attrs": {"href": "https://x.example"}}
    text = {"type": "text", "text": "here", "marks": [mark] * 100_000}
    assert len(adf.storage({"type": "paragraph", "content": [text]})) < 2_000


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {
                "type": st.sampled_from(
                    ["paragraph", "text", "table", "tableRow", "tableCell", "heading", "date", "media"]
                )
            },
            optional={"text": inner, "attrs": inner, "content": inner, "marks": inner},
        )
    ),
    max_leaves=20,
)


@given(ANYTHING)
def test_no_document_fails(document: Any) -> None:
    markdown(adf.storage(document))
    list(adf.nodes(document))
