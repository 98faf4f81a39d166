"""Collections in other languages than English, in the layout of ``penstock eval``: the manual pages that Debian brings.

    python -m bench.manual_pages FOLDER

Each package is fetched by apt-get and kept only if it has the recorded hash; nothing of it is a part of this project.
A document is a page without its section NAME and without the first sentence of its description, cut at
PAGE_CHARACTERS. Those two are the queries, each with its ``kind``: ``summary`` and ``sentence``; the page that they
were taken from answers them. Nobody who wrote a query looked at how we search. A query that two pages have is left out.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.local.tools import download_debian, run_debian
from pipeline.core.errors import Misconfigured
from query.evaluation.dataset import Dataset, Document

SUITE = "trixie"
PAGES = 300
"""How many pages of one language are taken, chosen by the hashes of their names."""
PAGE_CHARACTERS = 2_000
FEWEST_CHARACTERS = 400
"""The least length of a document: a shorter page points to another one."""
QUERIES = 60
"""How many queries of each kind are taken, chosen by their hashes."""


@dataclass(frozen=True, slots=True)
class Package:
    """The pages of one language: a folder below usr/share/man (empty: English) in a package of Debian."""

    name: str
    sha256: str
    folder: str


PACKAGES: Mapping[str, Package] = {
    "german": Package("manpages-de", "82b0674a475ff39c7a366121f5823ff842300ecdeb596ad467787459cc539845", "de"),
    "french": Package("manpages-fr", "20a563c41d9483796260870634bb2a07b271026b99b888db87ea0ae0a99a63e5", "fr"),
    "spanish": Package("manpages-es", "feecf5e9105f612faeddff1df07459ee94da7e1ad9e51380dedf508487a17de5", "es"),
    "russian": Package("manpages-ru", "8e86695991e187a1e08332fd2fcfea5d25390439e8020171987db77f35b3f1b6", "ru"),
    "japanese": Package("manpages-ja", "4d270e9a1e83be4de0c072a110892a17dc9caa4b501257324006ac28d82c5743", "ja"),
    "english": Package("manpages", "91b7df0b4bd4e1a3b8ba5b229abd844e03f4c82c45ccb8c964a035190c29a501", ""),
}


@dataclass(frozen=True, slots=True)
class Page:
    name: str
    summary: str
    sentence: str
    body: str


def collection(language: str) -> Dataset:
    """Raises Misconfigured when the package cannot be fetched or is another one."""
    package = PACKAGES[language]
    with tempfile.TemporaryDirectory() as scratch:
        pages = list(_pages(_unpacked(package, Path(scratch)) / package.folder))
    pages = sorted(pages, key=lambda page: _digest(page.name))[:PAGES]
    queries: dict[str, str] = {}
    slices: dict[str, str] = {}
    judgements: dict[str, dict[str, int]] = {}
    for kind in ("summary", "sentence"):
        texts = {page.name: getattr(page, kind) for page in pages}
        times = Counter(texts.values())
        usable = [name for name, text in texts.items() if _is_query(text) and times[text] == 1]
        for name in sorted(usable, key=lambda name: _digest(f"{kind} {name}"))[:QUERIES]:
            id_ = f"{language} {kind} {name}"
            queries[id_], slices[id_] = texts[name], kind
            judgements[id_] = {f"{language} {name}": 1}
    documents = [Document(f"{language} {page.name}", page.name.partition(".")[0], page.body) for page in pages]
    return Dataset(language, documents, queries, judgements, slices)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _is_query(text: str) -> bool:
    return len(text.encode()) >= 15


def _unpacked(package: Package, scratch: Path) -> Path:
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg")
    if apt is None or dpkg is None:
        raise Misconfigured("this needs apt-get and dpkg, and so a Debian machine")
    download_debian(apt, scratch, SUITE, package.name)
    [archive] = scratch.glob("*.deb")
    if (held := hashlib.sha256(archive.read_bytes()).hexdigest()) != package.sha256:
        raise Misconfigured(f"{archive.name} has the SHA-256 {held}, which is not the recorded one")
    run_debian(dpkg, "-x", str(archive), str(scratch / "whole"), at=scratch)
    return scratch / "whole" / "usr" / "share" / "man"


def _pages(folder: Path) -> Iterator[Page]:
    for file in sorted(folder.glob("man[1-8]/*.gz")):
        if not file.is_symlink() and (page := _page(file.name.removesuffix(".gz"), gzip.decompress(file.read_bytes()))):
            yield page


_SECTION = re.compile(r"^\.SH +(.*)$", re.MULTILINE)
_SUMMARY = re.compile(r"(?:\s|\\f.)(?:\\-|\\\(en|\\\[en\]|–|-)\s+(.*)", re.DOTALL)
_SENTENCE = re.compile(r"[^.。]{15,300}?[.。](?=\s|$)")


def _page(name: str, roff: bytes) -> Page | None:
    """None: the page is another's name, is written in another format, or has too little text."""
    source = roff.decode(errors="replace")
    sections = _SECTION.split(source)[2:]  # without what is before the first section, and its heading: NAME
    if len(sections) < 3 or not (summary := _SUMMARY.search(sections[0])):
        return None
    body = "\n\n".join(
        f"{_text(heading)}\n\n{_text(text)}" for heading, text in zip(sections[1::2], sections[2::2], strict=True)
    )
    described = _text(sections[4]) if len(sections) > 4 else ""
    first = _SENTENCE.match(described.lstrip())
    sentence = first[0] if first else ""
    body = body.replace(sentence, "", 1)[:PAGE_CHARACTERS]
    if len(body) < FEWEST_CHARACTERS:
        return None
    return Page(name, " ".join(_text(summary[1]).split()), " ".join(sentence.split()), body)


_ALTERNATING = re.compile(r"^\.(?:BR|RB|BI|IB|IR|RI) +(.*)$")
_FACE = re.compile(r"^\.(?:B|I|SM|SB|SS|IP|UR|MT) +(.*)$")
_ARGUMENT = re.compile(r'"([^"]*)"|(\S+)')
_ESCAPES = (
    (re.compile(r'\\".*$', re.MULTILINE), ""),
    (re.compile(r"\\f(?:\[[^\]]*\]|\(..|.)|\\s[-+]?\d+|\\[&|^%/,c:]"), ""),
    (re.compile(r"\\[ ~0]"), " "),
    (re.compile(r"\\\((?:aq|oq|cq)|\\\[(?:aq|oq|cq)\]|\\'"), "'"),
    (re.compile(r"\\\((?:dq|lq|rq)|\\\[(?:dq|lq|rq)\]"), '"'),
    (re.compile(r"\\-|\\\((?:en|em|hy|mi)|\\\[(?:en|em|hy|mi)\]"), "-"),
    (re.compile(r"\\\(..|\\\[[^\]]*\]"), ""),
    (re.compile(r"\\e|\\\\"), r"\\"),
)


def _text(roff: str) -> str:
    """The text that a reader sees, without tables and equations."""
    lines = []
    for line in roff.splitlines():
        if alternating := _ALTERNATING.match(line):
            lines.append("".join(_arguments(alternating[1])))
        elif face := _FACE.match(line):
            lines.append(" ".join(_arguments(face[1])))
        elif line.startswith((".", "'")):
            lines.append("")
        else:
            lines.append(line)
    text = "\n".join(lines)
    for escape, shown in _ESCAPES:
        text = escape.sub(shown, text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _arguments(text: str) -> list[str]:
    return [quoted or bare for quoted, bare in _ARGUMENT.findall(text)]


def write(made: Dataset, folder: Path) -> None:
    """BEIR's layout."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"_id": d.id, "title": d.title, "text": d.text}) + "\n" for d in made.documents)
    with (folder / "queries.jsonl").open("w", encoding="utf-8") as file:
        for id_, text in made.queries.items():
            file.write(json.dumps({"_id": id_, "text": text, "metadata": {"kind": made.slices[id_]}}) + "\n")
    with (folder / "qrels" / "test.tsv").open("w", encoding="utf-8") as file:
        file.write("query-id\tcorpus-id\tscore\n")
        for id_, answers in made.judgements.items():
            file.writelines(f"{id_}\t{document}\t{gain}\n" for document, gain in answers.items())


if __name__ == "__main__":
    for name in PACKAGES:
        written = collection(name)
        write(written, Path(sys.argv[1], name))
        sys.stdout.write(f"{name}: {len(written.documents)} documents, {len(written.queries)} queries\n")
