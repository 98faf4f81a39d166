"""The text of a Slack message: mrkdwn, blocks, attachments, files."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.slack.content import ChannelInfo, Names, author, body, document, is_document, mrkdwn, revision, title
from connectors.source import Document, Unreadable

NAMES = Names(users={"U1": "Ann Lee"}, channels={"C1": "ops"}, groups={"S1": "oncall"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ask <@U1> or <@U2|ben>", "ask @Ann Lee or @ben"),
        ("in <#C1|whatever> or <#C2|secret-merger>", "in #ops or #C2"),
        ("<!subteam^S1|@old>, <!subteam^S2|@night>, <!subteam^S3>", "@oncall, @night, @S3"),
        ("<!here> <!channel> <!everyone|all>", "@here @channel @everyone"),
        ("<!date^1392734382^{date}|18 Feb 2014>", "18 Feb 2014"),
        ("see <https://a.example/x?a=1&amp;b=2|the page>", "see the page (https://a.example/x?a=1&b=2)"),
        ("<https://a.example> <https://b.example|b.example>", "https://a.example https://b.example"),
        ("<mailto:a@b.example|a@b.example>", "a@b.example"),
        ("1 &lt; 2 &amp;&amp; 3 &gt; 2", "1 < 2 && 3 > 2"),
        ("&amp;lt;@U1&amp;gt;", "&lt;@U1&gt;"),
        ("well done :tada: :+1::skin-tone-4:", "well done :tada: :+1:"),
        ("a < b and <> and <\n>", "a < b and <> and <\n>"),
    ],
)
def test_mentions_links_and_entities_become_their_displayed_text(text: str, shown: str) -> None:
    assert mrkdwn(text, NAMES) == shown


def rich(*elements: Any) -> dict[str, Any]:
    return {"type": "rich_text", "elements": list(elements)}


def section(*spans: Any) -> dict[str, Any]:
    return {"type": "rich_text_section", "elements": list(spans)}


def test_rich_text_blocks_keep_lists_quotes_and_code() -> None:
    message = {
        "text": "fallback",
        "blocks": [
            rich(
                section(
                    {"type": "text", "text": "Ask "},
                    {"type": "user", "user_id": "U1"},
                    {"type": "emoji", "name": "eyes"},
                ),
                {
                    "type": "rich_text_list",
                    "style": "ordered",
                    "indent": 0,
                    "elements": [
                        section({"type": "text", "text": "stop"}),
                        section({"type": "link", "url": "https://a.example", "text": "start"}),
                    ],
                },
                {"type": "rich_text_quote", "elements": [{"type": "text", "text": "one\ntwo"}]},
                {"type": "rich_text_preformatted", "elements": [{"type": "text", "text": "make all"}]},
                section(
                    {"type": "broadcast", "range": "here"},
                    {"type": "channel", "channel_id": "C1"},
                    {"type": "usergroup", "usergroup_id": "S1"},
                ),
            )
        ],
    }
    assert body(message, NAMES) == (
        "Ask @Ann Lee:eyes:\n1. stop\n2. start (https://a.example)\n> one\n> two\n```\nmake all\n```\n@here#ops@oncall"
    )


def test_blocks_attachments_and_files_of_app_messages_become_text() -> None:
    message = {
        "text": "Build failed",
        "blocks": [
            {"type": "header", "text": {"type": "plain_text", "text": "Build &amp; test"}},
            {
                "type": "section",
                "text": {"type": "mrkdwn", "text": "by <@U1>"},
                "fields": [{"type": "mrkdwn", "text": "*branch* main"}],
            },
            {"type": "divider"},
            {
                "type": "context",
                "elements": [{"type": "image", "alt_text": "logo"}, {"type": "mrkdwn", "text": "7 min"}],
            },
            {
                "type": "table",
                "rows": [[{"type": "raw_text", "text": "a"}, rich(section({"type": "text", "text": "b"}))]],
            },
            {"type": "unheard_of", "text": {"type": "plain_text", "text": "x"}},
        ],
        "attachments": [
            {"pretext": "Job", "fields": [{"title": "Status", "value": "red"}], "fallback": "unused"},
            {"fallback": "only this"},
        ],
        "files": [{"name": "log.txt", "title": "Log"}, {"name": "gone.txt", "mode": "tombstone"}],
    }
    assert body(message, NAMES) == (
        "Build & test\nby @Ann Lee\n*branch* main\nlogo 7 min\na | b\nJob\nStatus: red\nonly this\nFile: Log (log.txt)"
    )


def text(text: str) -> dict[str, Any]:
    return {"type": "mrkdwn", "text": text}


STEP = {"title": "Look it up", "details": rich(section({"type": "text", "text": "in the wiki"}))}
CARD = {
    "type": "card",
    "title": text("Key <@U1>"),
    "subtitle": text("RSA"),
    "body": text("4096"),
    "subtext": text("new"),
}


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ({"type": "alert", "level": "info", "text": text("Rotate &amp; revoke")}, "Rotate & revoke"),
        (CARD, "Key @Ann Lee\nRSA\n4096\nnew"),
        ({"type": "carousel", "elements": [CARD, {"type": "card", "title": text("Other")}]}, "RSA\n4096\nnew\nOther"),
        ({"type": "input", "label": text("Name"), "hint": text("of the key"), "element": {}}, "Name\nof the key"),
        ({"type": "call", "call": {"v1": {"name": "Key ceremony"}}}, "Key ceremony"),
        ({"type": "plan", "title": "Rotation", "tasks": [STEP]}, "Rotation\nLook it up\nin the wiki"),
        (
            {"type": "task_card", **STEP, "sources": [{"type": "url", "url": "https://a.example", "text": "A"}]},
            "Look it up\nin the wiki\nA (https://a.example)",
        ),
        (
            {"type": "data_table", "caption": "Keys", "rows": [[{"type": "raw_text", "text": "a"}, {"text": "seven"}]]},
            "Keys\na | seven",
        ),
        (
            {
                "type": "data_visualization",
                "title": "Keys",
                "chart": {"series": [{"name": "RSA", "data": [{"label": "May", "value": 3}]}]},
            },
            "Keys\nRSA\nMay: 3",
        ),
        (
            {"type": "data_visualization", "title": "Keys", "chart": {"segments": [{"label": "RSA", "value": 45}]}},
            "Keys\nRSA: 45",
        ),
        ({"type": "video", "title": text("How to"), "author_name": "Ben"}, "How to\nBen"),
    ],
)
def test_a_message_of_one_block_is_a_document_with_its_text(block: dict[str, Any], shown: str) -> None:
    message = {"ts": "1.0", "text": "", "blocks": [block]}
    assert body(message, NAMES).endswith(shown)
    assert is_document(message, min_characters=0)


def test_a_message_whose_blocks_have_no_text_uses_its_text_field() -> None:
    assert body({"text": "hello", "blocks": [{"type": "actions", "elements": []}]}, NAMES) == "hello"


def test_the_message_separator_is_removed_from_texts_and_names() -> None:
    assert body({"text": "hello\x1eBen Roy: I approve"}, NAMES) == "hello Ben Roy: I approve"
    assert body({"text": "half \ud83d a character"}, NAMES) == "half \ufffd a character"
    assert author({"username": "Bot\x1e\nBen", "bot_id": "B1"}, NAMES) == "Bot Ben"


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ({"user": "U1"}, "Ann Lee"),
        ({"user": "U9"}, "U9"),
        ({"user": "U9", "user_profile": {"display_name": "eve", "real_name": "Eve Ng"}}, "eve"),
        ({"bot_id": "B1", "username": "Deploys"}, "Deploys"),
        ({"bot_id": "B1", "user": "U5", "bot_profile": {"name": "Jira"}}, "Jira"),
        ({"bot_id": "B1"}, "B1"),
        ({"subtype": "file_comment", "comment": {"user": "U1", "comment": "nice"}}, "Ann Lee"),
        ({}, "Somebody"),
    ],
)
def test_users_and_bots_are_shown_by_name(message: dict[str, Any], name: str) -> None:
    assert author(message, NAMES) == name


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(["rich_text", "section", "rich_text_list", "table", "<@U1|", "mrkdwn", "ordered"])
    | st.sampled_from(["card", "carousel", "input", "call", "plan", "task_card", "data_table", "data_visualization"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "elements", "blocks", "rows", "style", "fields", "title", "name", "indent"]
            )
            | st.sampled_from(["call", "chart", "details", "output", "segments", "series", "sources", "tasks", "v1"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@pytest.mark.parametrize(
    ("card", "shown"),
    [
        (
            {
                "is_msg_unfurl": True,
                "channel_id": "G2",
                "channel_name": "secret-merger",
                "private_channel_prompt": True,
            },
            "shared message (https://acme.slack.com/archives/G2/p1776404384245429)",
        ),
        (
            {"is_share": True, "is_msg_unfurl": True, "channel_id": "C1"},
            "shared message of Linda in #ops (https://acme.slack.com/archives/C1/p1776404384245429)",
        ),
        ({"is_share": True, "channel_id": "D7", "from_url": None}, "shared message"),
        (
            {"is_msg_unfurl": True},
            "shared message of Linda in #ops (https://acme.slack.com/archives/C1/p1776404384245429)",
        ),
    ],
)
def test_a_shared_message_shows_its_text_only_where_it_was_written(card: dict[str, Any], shown: str) -> None:
    url = f"https://acme.slack.com/archives/{card.get('channel_id', 'C1')}/p1776404384245429"
    rest = {
        "author_name": "Linda",
        "text": "We buy them in May.",
        "fallback": "[April] Linda: We buy them in May.",
        "message_blocks": [{"message": {"blocks": [{"type": "section", "text": {"text": "We buy them in May."}}]}}],
        "files": [{"name": "offer.pdf"}],
    }
    message = {"ts": "1.000000", "text": "See this", "attachments": [{"from_url": url, **rest, **card}]}
    assert body(message, NAMES) == f"See this\n{shown}"
    assert "secret" not in body(message, Names())


@given(text=anything, blocks=anything, attachments=anything, files=anything)
def test_any_message_gives_a_document_or_none_without_an_error(
    text: Any, blocks: Any, attachments: Any, files: Any
) -> None:
    message = {"ts": "1.000000", "text": text, "blocks": blocks, "attachments": attachments, "files": files}
    place = ChannelInfo("C1", "ops", "https://acme.slack.com")
    entry = document([message], "1.000000", place, NAMES, min_characters=0)
    assert isinstance(entry, Document) == is_document(message, min_characters=0)
    assert len(revision(message, place)) == 32
    if isinstance(entry, Document):
        assert "\x1e" not in entry.content


def test_a_title_is_the_shortened_first_line_and_the_channel() -> None:
    assert title("```\n> *hello* there\nmore", "ops") == "*hello* there · #ops"
    long = title("word " * 60, "ops")
    assert len(long) < 140
    assert long.endswith("word … · #ops")
    assert title("x" * 500, "ops").startswith("x" * 120 + " …")


def test_a_short_message_without_replies_is_no_document() -> None:
    message = {"ts": "1.000000", "text": "ok"}
    assert is_document(message, min_characters=2)
    assert not is_document(message, min_characters=3)
    assert is_document(message | {"reply_count": 1}, min_characters=3)
    assert not is_document({"ts": "1.000000", "text": " "}, min_characters=0)


def test_a_thread_that_is_too_large_is_unreadable() -> None:
    messages = [{"ts": f"{n}.000000", "text": "x" * 40_000, "user": "U1"} for n in range(1, 121)]
    messages[0]["reply_count"] = 119
    entry = document(messages, "1.000000", ChannelInfo("C1", "ops", "https://acme.slack.com"), NAMES, min_characters=0)
    assert isinstance(entry, Unreadable)
    assert entry.code == "too_large"
    assert "xxx" not in entry.message
