"""A second collection to judge retrieval on, in the BEIR layout, made from the documentation that every Python brings.

    python -m bench.python_docs FOLDER

What was tuned on Cranfield is judged here, and the reverse. Documents: the language reference's topics without their
headings, and one for each documented function and class of the standard library: its name, signature and docstring
without the summary sentence. Queries, each with its ``kind`` in the metadata:

- ``summary``: the sentence that was taken out of a docstring; its own document answers it.
- ``heading``: a heading that was taken out of a topic; every topic that holds the section's first paragraph answers it.
- ``question``: people's questions about the topics (``tests/support/query/questions.py``).
- ``literal``: three to six neighbouring content words of a sentence, as half remembered; every document that holds them
  in this order answers it.

Nothing is drawn at random that a seed does not fix; another Python has other documents.
"""

from __future__ import annotations

import ast
import importlib
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from textwrap import dedent

from tests.support.query.questions import QUESTIONS

MODULES = (  # noqa: SIM905  (one name a line would be longer than the module)
    """
    abc argparse ast asyncio.events asyncio.streams asyncio.tasks base64 bdb bisect calendar cmd codecs
    collections concurrent.futures._base configparser contextlib copy csv dataclasses datetime decimal difflib
    dis doctest email.message email.policy enum fileinput fnmatch fractions ftplib functools gettext glob gzip
    hashlib heapq hmac html html.parser http.client http.cookiejar http.server imaplib importlib.abc
    importlib.resources inspect io ipaddress json json.decoder json.encoder keyword linecache locale logging
    logging.config logging.handlers lzma mailbox mimetypes multiprocessing.managers multiprocessing.pool numbers
    operator optparse os os.path pathlib pdb pickle pickletools pkgutil platform plistlib poplib pprint profile
    pstats queue random reprlib sched secrets selectors shelve shlex shutil smtplib socket socketserver
    sqlite3.dump ssl stat statistics string stringprep struct subprocess sysconfig tarfile tempfile textwrap
    threading timeit token tokenize tomllib trace traceback tracemalloc types typing unittest.case
    unittest.loader unittest.mock unittest.suite urllib.parse urllib.request urllib.robotparser uuid venv
    warnings wave weakref webbrowser xml.dom.minidom xml.etree.ElementTree xml.sax.saxutils zipapp zipfile
    zoneinfo
    """
).split()
SUMMARIES, LITERALS = 250, 150
FEWEST_CHARACTERS = 150
"""Least length of a docstring without its summary: a shorter one does not answer the summary."""
SEED = 20261121
COMMON = frozenset(
    """
    a about all an and any are as at be been but by can do does for from has have if in into is it its may more
    not of on one only or other same so such than that the their then there these they this to used was were
    when where which will with would you
    """.split()  # noqa: SIM905
)
_HEADING = re.compile(r"^(\S.*)\n([*=\-~^\"])\2{3,}\n+", re.MULTILINE)


@dataclass
class Query:
    text: str
    kind: str
    relevant: frozenset[str]


@dataclass
class Collection:
    documents: dict[str, str] = field(default_factory=dict)
    queries: list[Query] = field(default_factory=list)


def collection() -> Collection:
    made, dice = Collection(), random.Random(SEED)
    _topics(made)
    _members(made, dice)
    _literals(made, dice)
    return made


def _topics(made: Collection) -> None:
    for name, text in topics.items():
        made.documents[f"topic.{name}"] = _HEADING.sub("", text).strip()
    sections: dict[str, str] = {}
    for text in topics.values():
        headings = list(_HEADING.finditer(text))
        for heading, following in zip(headings, [*(m.start() for m in headings[1:]), len(text)], strict=True):
            paragraph = text[heading.end() : following].strip().split("\n\n")[0]
            if len(heading[1].split()) > 1 and len(paragraph) > 60:
                sections.setdefault(heading[1], paragraph)
    for title, paragraph in sections.items():
        made.queries.append(Query(title, "heading", _containing(made, paragraph)))
    for question, names in QUESTIONS:
        made.queries.append(Query(question, "question", frozenset(f"topic.{name}" for name in names)))


def _containing(made: Collection, passage: str) -> frozenset[str]:
    return frozenset(name for name, text in made.documents.items() if passage in text)


def _members(made: Collection, dice: random.Random) -> None:
    summaries: list[Query] = []
    for module in MODULES:
        path = importlib.import_module(module).__file__
        assert path is not None, f"{module} has no source"
        source = Path(path).read_bytes()
        for name, signature, docstring in _documented(ast.parse(source), module):
            summary, _, rest = docstring.partition("\n\n")
            summary, rest = " ".join(summary.split()), dedent(rest).strip()
            if len(rest) < FEWEST_CHARACTERS or name in made.documents:
                continue
            made.documents[name] = f"{signature}\n\n{rest}"
            if 5 <= len(summary.split()) <= 30:
                summaries.append(Query(summary, "summary", frozenset({name})))
    unique = {query.text: query for query in summaries}
    made.queries += dice.sample(list(unique.values()), min(SUMMARIES, len(unique)))


def documented_members(modules: Sequence[str]) -> dict[str, str]:
    """Return the members' docstrings of those modules that can be read, without their summaries, by their names."""
    members: dict[str, str] = {}
    for module in modules:
        spec = find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        for name, signature, docstring in _documented(ast.parse(Path(spec.origin).read_bytes()), module):
            rest = dedent(docstring.partition("\n\n")[2]).strip()
            if len(rest) >= FEWEST_CHARACTERS:
                members.setdefault(name, f"{signature}\n\n{rest}")
    return members


def _documented(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, signature and docstring of each public function and class."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            if docstring := ast.get_docstring(node):
                arguments = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
                yield name, f"{node.name}{arguments}", docstring
            if isinstance(node, ast.ClassDef):
                yield from _documented(node, name)


def _literals(made: Collection, dice: random.Random) -> None:
    """Add queries of neighbouring content words, without the common words between them, as people remember them."""
    words = {name: _content(text) for name, text in made.documents.items()}
    joined = {name: f" {' '.join(of)} " for name, of in words.items()}
    names = sorted(name for name, of in words.items() if len(of) > 30)
    for _ in range(LITERALS):
        of = words[dice.choice(names)]
        start, length = dice.randrange(len(of) - 6), dice.randint(3, 6)
        text = " ".join(of[start : start + length])
        containing = frozenset(name for name, all_words in joined.items() if f" {text} " in all_words)
        made.queries.append(Query(text, "literal", containing))


def _content(text: str) -> list[str]:
    return [word for word in re.findall(r"[A-Za-z_]\w+", text.lower()) if word not in COMMON]


def write(folder: Path) -> Collection:
    made = collection()
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as corpus:
        for name, text in made.documents.items():
            corpus.write(json.dumps({"_id": name, "title": name.removeprefix("topic."), "text": text}) + "\n")
    with (
        (folder / "queries.jsonl").open("w", encoding="utf-8") as queries,
        (folder / "qrels" / "test.tsv").open("w", encoding="utf-8") as qrels,
    ):
        qrels.write("query-id\tcorpus-id\tscore\n")
        for number, query in enumerate(made.queries, start=1):
            queries.write(json.dumps({"_id": f"{number}", "text": query.text, "metadata": {"kind": query.kind}}) + "\n")
            for name in sorted(query.relevant):
                qrels.write(f"{number}\t{name}\t1\n")
    return made


if __name__ == "__main__":
    written = write(Path(sys.argv[1]))
    sys.stdout.write(f"{len(written.documents)} documents, {len(written.queries)} queries\n")
