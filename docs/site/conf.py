"""Sphinx's configuration of the documentation site. ``python -m docs.site`` builds it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers.sql import PostgresLexer
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.site import diagram  # noqa: E402

project, release = "Penstock", version_of("penstock")
version = release

extensions = ["myst_parser", "sphinx_external_toc", "sphinx_copybutton", "sphinx.ext.autodoc"]
external_toc_path = str(Path(__file__).with_name("toc.yml"))
exclude_patterns = ["site"]
nitpicky = False
highlight_language = "text"
default_role = "code"  # single backticks in docstrings

myst_heading_anchors = 4  # the anchors that GitHub makes
myst_fence_as_directive: list[str] = []
# A command and the lines that continue it; not a line of an answer, which is quoted too and ends with a citation.
copybutton_prompt_text = r"\$ |>(?: |$)(?!.*\[\d+\]$)"
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True, "exclude-members": "model_config"}
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = "Penstock"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_use_index = html_domain_indices = False
html_show_sourcelink = False
html_copy_source = False
html_sidebars: dict[str, list[str]] = {
    page: [] for page in ("index", "tutorial", "comparison", "search")
}  # no section of their own
html_context = {"default_mode": "auto"}
html_favicon = "../../query/page/icon.svg"
html_theme_options: dict[str, Any] = {
    "navbar_align": "left",
    "logo": {
        "image_light": "../../query/page/icon.svg",
        "image_dark": "../../query/page/icon.svg",
        "text": "Penstock",
        "alt_text": "",
    },
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "show_nav_level": 1,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

GENERATED: Mapping[str, str] = {
    "settings": "settings:document",
    "connector-options": "settings:connector_options",
    "metadata-keys": "settings:metadata_keys",
    "commands": "commands:document",
    "messages": "messages:document",
    "endpoints": "endpoints:document",
    "events": "events:document",
    "python": "python:document",
    "decisions": "decisions:document",
    "growth": "growth:document",
}
"""By what a page's comment ``<!-- generated: NAME -->`` is replaced: the result of a function of this package."""
MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


OUTSIDE = re.compile(r"(?<=\]\()(?=(?:\.\./)+[^)#]+\.md[)#])")
"""Where the address of a link to a Markdown file in a parent folder begins."""


def insert_generated(_: Sphinx, __: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda mark: generated(mark[1]), source[0])


def offer_outside_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Pages outside of docs/ are not pages of the site: like other files there, they are offered for download."""
    folder = Path(app.env.doc2path(name)).parent

    def mark(link: re.Match[str]) -> str:
        target = (folder / re.split(r"[)#]", source[0][link.end() :], maxsplit=1)[0]).resolve()
        return "" if target.is_relative_to(app.srcdir) else "path:"

    source[0] = OUTSIDE.sub(mark, source[0])


def generated(name: str) -> str:
    """Import what it needs, which is most of Penstock, when it is needed. Raises KeyError for an unknown name."""
    module, _, function = GENERATED[name].partition(":")
    return str(getattr(import_module(f"docs.site.{module}"), function)())


def draw_diagrams(_: Sphinx, document: nodes.document) -> None:
    for block in list(document.findall(nodes.literal_block)):
        if block.get("language") == "mermaid":
            block.replace_self(nodes.raw("", diagram.svg(block.astext()), format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_lexer("sql", PostgresLexer)  # knows $1
    app.connect("source-read", insert_generated)
    app.connect("source-read", offer_outside_pages)
    app.connect("doctree-read", draw_diagrams)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
