"""The documentation site: it is whole, and complete enough to be read without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.site.__main__ import DOCS
from tests.support.space import PROJECT


def built(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: Sphinx changes global state."""
    return subprocess.run(
        [sys.executable, *arguments, str(output)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )


class Loaded(HTMLParser):
    """The addresses that a browser loads to show a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.add(named.get("src") or "")
        elif tag == "link" and named.get("rel") in ("stylesheet", "icon", "preload", "modulepreload"):
            self.addresses.add(named.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built as ``make docs`` does."""
    output = tmp_path_factory.mktemp("site") / "html"
    done = built(output, "-m", "docs.site")
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.slow
def test_the_site_has_a_page_for_every_page_of_docs(site: Path) -> None:
    sources = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert len(sources) > 100
    assert {path for path in sources if not (site / path).is_file()} == set()


@pytest.mark.slow
def test_a_reader_without_a_network_sees_all_of_it(site: Path) -> None:
    for page in site.rglob("*.html"):
        elsewhere = {address for address in Loaded(page.read_text()).addresses if re.match(r"(\w+:)?//", address)}
        assert elsewhere == set(), page
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert re.findall(r"""(?:@import|url\()\s*["']?(?:https?:)?//[^)]*""", styles) == []
    assert (site / "searchindex.js").stat().st_size > 200_000


@pytest.mark.slow
def test_generated_parts_and_the_diagram_are_on_their_pages(site: Path) -> None:
    assert not [path for path in site.rglob("*.html") if "<!-- generated:" in path.read_text()]
    assert "PENSTOCK_STREAM_LIVE_DOCUMENTS_PER_SECOND" in (site / "reference" / "settings.html").read_text()
    assert "penstock generation cutover" in (site / "reference" / "commands.html").read_text()
    assert 'id="penstock.source.SmallSource"' in (site / "reference" / "python.html").read_text()
    assert 'href="0003-edit-stable-chunks.html"' in (site / "adr" / "README.html").read_text()
    architecture = (site / "architecture.html").read_text()
    assert ">pipeline.ledger</text>" in architecture
    assert "flowchart TD" not in architecture


STRICT = """
import sys
from pathlib import Path
from docs.site.__main__ import build
output = Path(sys.argv[1])
sys.exit(build(output, "-D", f"external_toc_path={output.parent / 'toc.yml'}", pages=output.parent / "docs"))
"""


@pytest.mark.heavy
def test_a_broken_link_or_a_page_in_no_table_of_contents_fails_the_build(tmp_path: Path) -> None:
    defects = {
        "a page": "[gone](gone-page.md)",
        "an anchor": "[gone](other.md#gone-anchor)",
        "a picture": "![gone](gone-picture.png)",
        "a file": "[gone](../gone-file.py)",
        "right": "[one](other.md#a-heading), [a file](toc.yml) and [a page outside](../outside.md)",
    }
    text = "".join(f"## {name}\n\n{link}\n\n" for name, link in defects.items())
    pages(tmp_path, {"index": text, "other": "## A heading", "forgotten": ""}, listed=("other",))
    done = built(tmp_path / "html", "-c", STRICT)
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    for name in ("gone-page.md", "gone-anchor", "gone-picture.png", "gone-file.py", "forgotten"):
        assert [line for line in warnings if name in line], f"{name} is not in {warnings}"
    assert len(warnings) == 5


def pages(folder: Path, texts: dict[str, str], *, listed: tuple[str, ...]) -> None:
    (folder / "docs").mkdir()
    for name, text in texts.items():
        (folder / "docs" / f"{name}.md").write_text(f"# {name}\n\n{text}\n")
    (folder / "docs" / "toc.yml").write_text("")
    (folder / "outside.md").write_text("# Outside\n")
    entries = "".join(f"      - file: {name}\n" for name in listed)
    (folder / "toc.yml").write_text(f"root: index\nsubtrees:\n  - entries:\n{entries}")
