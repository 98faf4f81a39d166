"""What of a macro is text. Parameters are settings (and may be passwords): only those named here are ever shown."""

from __future__ import annotations

from collections.abc import Mapping

from connectors.confluence.storage import Element, attribute, child, name, text_of

CODE = frozenset({"code", "noformat"})
LABELLED = {
    "info": "Info", "note": "Note", "warning": "Warning", "tip": "Tip", "panel": "", "expand": "", "details": "",
    "excerpt": "",
}  # fmt: skip
"""Macro → what stands above its body where it has no title of its own."""
TITLES = frozenset({"code", "noformat", "info", "note", "warning", "tip", "panel", "expand"})
SHOWN = {"status": "title", "jira": "key", "jiraissues": "key"}
"""Macros whose text is a parameter."""
FILES = frozenset({"view-file", "viewpdf", "viewdoc", "viewxls", "viewppt", "multimedia", "attachments"})
LANGUAGES = {
    "c#": "csharp", "c++": "cpp", "html/xml": "xml", "none": "", "plain": "", "text": "", "py": "python",
    "js": "javascript", "shell": "bash", "sh": "bash", "yml": "yaml",
}  # fmt: skip
EMOTICONS = {
    "smile": "🙂", "sad": "🙁", "cheeky": "😛", "laugh": "😀", "wink": "😉", "thumbs-up": "👍", "thumbs-down": "👎",
    "information": "ℹ️", "tick": "✅", "cross": "❌", "warning": "⚠️", "plus": "➕", "minus": "➖", "question": "❓",
    "light-on": "💡", "light-off": "💡", "yellow-star": "⭐", "red-star": "⭐", "green-star": "⭐", "blue-star": "⭐",
    "heart": "❤️", "broken-heart": "💔",
}  # fmt: skip
"""https://confluence.atlassian.com/doc/confluence-storage-format-790796544.html, “Emoticons”."""


def parameter(macro: Element, wanted: str) -> str:
    for one in macro:
        if name(one) == "ac:parameter" and attribute(one, "ac:name") == wanted:
            return text_of(one).strip()
    return ""


def title(macro: Element) -> str:
    kind = attribute(macro, "ac:name")
    return (parameter(macro, "title") if kind in TITLES else "") or LABELLED.get(kind, "")


def language(macro: Element) -> str:
    given = (parameter(macro, "language") or parameter(macro, "lang")).lower()
    found = LANGUAGES.get(given, given)
    return found if all(char.isalnum() or char in "-_+" for char in found) else ""


def file_shown(macro: Element) -> str:
    """The name of the attachment that a macro puts on the page."""
    if attribute(macro, "ac:name") not in FILES:
        return ""
    for one in macro:
        if name(one) == "ac:parameter" and (found := child(one, "ri:attachment")) is not None:
            return attribute(found, "ri:filename")
    return ""


def emoticon(element: Element) -> str:
    fallback = attribute(element, "ac:emoji-fallback")
    known = EMOTICONS.get(attribute(element, "ac:name"), "")
    return fallback if fallback and not fallback.startswith(":") else known or fallback


def target(link: Element, names: Mapping[str, str]) -> str:
    """What a link leads to, by its name for people. names: of users, by id."""
    for one in link.iter():
        found = {
            "ri:page": attribute(one, "ri:content-title"),
            "ri:blog-post": attribute(one, "ri:content-title"),
            "ri:attachment": attribute(one, "ri:filename"),
            "ri:shortcut": attribute(one, "ri:parameter"),
            "ri:space": attribute(one, "ri:space-key"),
        }.get(name(one))
        if found:
            return found
        if name(one) == "ri:user":
            return person(one, names)
    return attribute(link, "ac:anchor")


def person(element: Element, names: Mapping[str, str]) -> str:
    """``@Ann Ant``. Who cannot be named is no text: an id would be noise to search in."""
    keys = (attribute(element, f"ri:{key}") for key in ("account-id", "userkey", "username"))
    found = next((names[key] for key in keys if key in names), "") or attribute(element, "ri:username")
    return f"@{found}" if found else "@unknown"


def picture(element: Element) -> str:
    """alt, else title, else the file's name."""
    for key in ("ac:alt", "ac:title"):
        if found := attribute(element, key):
            return found
    for one in element:
        if name(one) == "ri:attachment":
            return attribute(one, "ri:filename")
        if name(one) == "ri:url":
            return attribute(one, "ri:value").partition("?")[0].rstrip("/").rpartition("/")[2]
    return ""
