"""How well the documents of a follow-up question are retrieved, as it is typed and with the words carried over.

    python -m bench.conversations

Uses the running local stack (``penstock up``), in a place of its own, and the documentation that Python brings
(bench/python_docs.py). Follow-ups were written by hand, with a question that says the same without its conversation.
The rules of ``query.answers.follow_up`` were written before the conversations and may be tuned on every second one; the
others are held out. New questions (pairs of the collection's own) show what carrying costs where it is out of place.
Prints JSON: bench/results/conversations.json.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from bench.machine import moment
from bench.python_docs import write
from pipeline.embedding.choose import embedder
from pipeline.runtime.settings import dist, load
from query.answers.follow_up import carry_over, is_follow_up
from query.embedding.embedders import QueryEmbedder
from query.evaluation import place
from query.evaluation.dataset import Dataset, read
from query.evaluation.measures import compare, interval, measure
from query.evaluation.rank import rank
from query.modes.material import Turn
from query.retrieval.search import Search, Timeouts
from query.settings import RetrievalSettings
from tests.support.query.questions import QUESTIONS

PATIENT = Timeouts(60.0, 60.0, 60.0)
MEASURES = ("nDCG@10", "recall@50")


@dataclass(frozen=True, slots=True)
class FollowUp:
    before: str
    """The first question."""
    text: str
    whole: str
    """The follow-up as somebody writes it who knows no conversation: the best that rewriting can do."""
    relevant: frozenset[str]
    answer: str = ""
    """The answer to the first question, where the follow-up needs it."""


FOLLOW_UPS = tuple(
    FollowUp(before, text, whole, frozenset(relevant.split()), *answer)
    for before, text, whole, relevant, *answer in (
        (
            "format a number with thousands separators",
            "And in hexadecimal?",
            "format a number in hexadecimal",
            "topic.formatstrings topic.string-methods",
        ),
        (
            "How do I open a tar archive?",
            "And how do I extract everything from it?",
            "extract all members of a tar archive",
            "tarfile.TarFile.extractall",
        ),
        (
            "decode base64 text",
            "What about the alphabet for URLs?",
            "decode base64 with the URL-safe alphabet",
            "base64.urlsafe_b64decode",
        ),
        (
            "Which methods does an object need for a with block?",
            "How do I make one from a generator function?",
            "make a context manager for a with block from a generator function",
            "contextlib.contextmanager contextlib.asynccontextmanager",
        ),
        (
            "compute the median of a list",
            "And for grouped data?",
            "median of grouped continuous data",
            "statistics.median_grouped",
        ),
        (
            "How do I start a thread?",
            "How do I wait until it has ended?",
            "wait until a thread has terminated",
            "threading.Thread.join",
        ),
        (
            "parse an XML file",
            "How do I write it back to a file?",
            "write an XML element tree to a file",
            "xml.etree.ElementTree.ElementTree.write",
        ),
        (
            "create an element of an XML document",
            "And a comment?",
            "create a comment element of an XML document",
            "xml.etree.ElementTree.Comment",
        ),
        (
            "send a mail over SMTP",
            "How do I log in first?",
            "log in on an SMTP server",
            "smtplib.SMTP.login",
        ),
        (
            "upload a file over FTP",
            "And download it in binary mode?",
            "retrieve a file over FTP in binary mode",
            "ftplib.FTP.retrbinary",
        ),
        (
            "replace an object by a mock in a test",
            "How do I check its calls in order?",
            "assert that a mock has been called with these calls in order",
            "unittest.mock.NonCallableMock.assert_has_calls",
        ),
        (
            "test that a function raises an exception",
            "And that the message matches a pattern?",
            "assert that the message of a raised exception matches a regular expression",
            "unittest.case.TestCase.assertRaisesRegex",
        ),
        (
            "assert in a unit test that two lists are equal",
            "What about sets?",
            "assert in a unit test that two sets are equal",
            "unittest.case.TestCase.assertSetEqual",
        ),
        (
            "create a temporary file",
            "And a directory?",
            "create a temporary directory",
            "tempfile.mkdtemp",
        ),
        (
            "wrap a long text to lines of a width",
            "Can it also be cut off with a placeholder?",
            "shorten a text to a width with a placeholder",
            "textwrap.shorten",
        ),
        (
            "copy a file with its metadata",
            "And a whole tree?",
            "copy a directory tree recursively",
            "shutil.copytree",
        ),
        (
            "compute the hash of a message",
            "And with a secret key?",
            "compute a keyed hash (HMAC) of a message",
            "hmac.new",
        ),
        (
            "show the differences of two texts",
            "as HTML, side by side?",
            "HTML table with a side by side comparison of the differences of two texts",
            "difflib.HtmlDiff difflib.HtmlDiff.make_table difflib.HtmlDiff.make_file",
        ),
        (
            "insert an item into a sorted list",
            "And to the left of equal ones?",
            "insert an item into a sorted list to the left of equal items",
            "bisect.insort_left",
        ),
        (
            "write a decorator for a function",
            "How does it keep the name and the docstring?",
            "decorator that keeps the name and the docstring of the wrapped function",
            "functools.wraps functools.update_wrapper",
        ),
        (
            "decorator that makes a dataclass",
            "How do I turn an instance into a dictionary?",
            "turn an instance of a dataclass into a dictionary",
            "dataclasses.asdict",
        ),
        (
            "a named tuple with types",
            "And a dictionary with typed keys?",
            "type of a dictionary with a fixed set of typed keys",
            "typing.TypedDict",
        ),
        (
            "wait for several asyncio tasks",
            "How do I protect one from being cancelled?",
            "protect an asyncio task from cancellation",
            "asyncio.tasks.shield",
        ),
        (
            "encode parameters as the query of a URL",
            "And read them back?",
            "parse the query of a URL into parameters",
            "urllib.parse.parse_qsl urllib.parse.parse_qs",
        ),
        (
            "run another program in a subprocess",
            "How do I send it input and read its output?",
            "send input to a subprocess and read its output",
            "subprocess.Popen.communicate subprocess.run",
        ),
        (
            "list what is in a zip file",
            "And open one of them for reading?",
            "open a member of a zip file for reading",
            "zipfile.ZipFile.open",
        ),
        (
            "set a breakpoint and step through my program",
            "How do I see the stack there?",
            "show the stack trace in the debugger",
            "topic.debugger",
        ),
        (
            "overload the plus operator for my own type",
            "And for less than?",
            "overload the less than operator for my own type",
            "topic.customization topic.specialnames topic.comparisons",
        ),
        (
            "read a header of an email message",
            "What if there are several of them?",
            "get all values of a header that occurs several times in an email message",
            "email.message.Message.get_all",
        ),
        (
            "iterate over the attachments of an email message",
            "How are they called?",
            "file name of an attachment of an email message",
            "email.message.Message.get_filename",
        ),
        (
            "read a line from an asyncio network stream",
            "And up to a separator of my own?",
            "read from an asyncio stream until a separator",
            "asyncio.streams.StreamReader.readuntil",
        ),
        (
            "create a TCP server in the asyncio event loop",
            "And on a Unix socket?",
            "create a server on a Unix socket in the asyncio event loop",
            "asyncio.events.AbstractEventLoop.create_unix_server",
        ),
        (
            "delete a directory with everything in it",
            "How do I make a zip of it before?",
            "make a zip archive of a directory",
            "shutil.make_archive",
        ),
        (
            "create a directory with all its parents",
            "And remove the empty ones again?",
            "remove empty directories up to the parents",
            "os.removedirs",
        ),
        (
            "put an item into a queue of threads",
            "And take one out, with a time limit?",
            "get an item from a queue of threads with a timeout",
            "queue.Queue.get",
        ),
        (
            "Which class counts hashable items?",
            "How do I subtract with it?",
            "subtract counts from a Counter",
            "collections.Counter.subtract",
            "`collections.Counter` counts hashable items [1].",
        ),
        (
            "Which class groups several mappings into one view?",
            "What happens when I write to it?",
            "writes to a ChainMap",
            "collections.ChainMap",
            "A `ChainMap` groups them [1].",
        ),
        (
            "What reads INI files?",
            "Can it also take a dictionary?",
            "ConfigParser reads configuration from a dictionary",
            "configparser.RawConfigParser.read_dict",
            "`configparser.ConfigParser` reads them [1].",
        ),
        (
            "Which class compares pairs of sequences?",
            "How does it return the blocks that match?",
            "matching blocks of a SequenceMatcher",
            "difflib.SequenceMatcher.get_matching_blocks",
            "`difflib.SequenceMatcher` compares them [1].",
        ),
        (
            "How do I encrypt the connection to a mail server?",
            "What if the session should begin without it?",
            "put an SMTP session into TLS mode with STARTTLS",
            "smtplib.SMTP.starttls",
            "Use `smtplib.SMTP_SSL` [1].",
        ),
    )
)
STEP = 7
"""The distance of two questions of the collection that are asked one after the other as new ones."""


def new_questions() -> list[FollowUp]:
    """Questions about something else than the question before."""
    return [
        FollowUp(QUESTIONS[n - STEP][0], text, text, frozenset(f"topic.{name}" for name in names))
        for n, (text, names) in enumerate(QUESTIONS)
    ]


def turned(question: FollowUp) -> list[Turn]:
    return [Turn(question.before, question.answer)]


def asking(dataset: Dataset, queries: Sequence[str], questions: Sequence[FollowUp]) -> Dataset:
    """The collection with these texts as its questions."""
    ids = [f"{n}" for n in range(len(questions))]
    judgements = {id_: dict.fromkeys(of.relevant, 1) for id_, of in zip(ids, questions, strict=True)}
    return replace(dataset, queries=dict(zip(ids, queries, strict=True)), judgements=judgements, slices={})


async def run(search: Search, dataset: Dataset, questions: Sequence[FollowUp]) -> dict[str, Any]:
    variants = {
        "as typed": [of.text for of in questions],
        "carried over": [carry_over(of.text, turned(of)) for of in questions],
        "always carried over": [f"{of.text} ({of.before})" for of in questions],
        "written to stand alone": [of.whole for of in questions],
    }
    caller = await search.identify(place.TENANT, tags=[place.TAG])
    values = {}
    for name, queries in variants.items():
        of_variant = asking(dataset, queries, questions)
        rankings, degraded = await rank(search, caller, of_variant, ["hybrid"])
        assert not degraded, degraded
        values[name] = measure(rankings["hybrid"], of_variant.judgements)
    result: dict[str, Any] = {
        "questions": len(questions),
        "taken for follow-ups": sum(is_follow_up(of.text) for of in questions),
    }
    for name in variants:
        line: dict[str, Any] = {}
        for by in MEASURES:
            mean = interval(values[name][by])
            line[by] = [round(number, 4) for number in (mean.mean, mean.low, mean.high)]
            if name != "as typed":
                difference = compare(values[name][by], values["as typed"][by])
                line[f"{by} over as typed"] = [
                    round(difference.difference.mean, 4),
                    round(difference.p_randomisation, 4),
                ]
        result[name] = line
    return result


async def main() -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    settings, model, began = load(), embedder(load().embedding, dist() / "models"), moment()
    try:
        with tempfile.TemporaryDirectory() as made:
            write(Path(made) / "python_docs")
            dataset = read(Path(made) / "python_docs")
        documents = {document.id for document in dataset.documents}
        assert not (missing := frozenset[str]().union(*(of.relevant for of in FOLLOW_UPS)) - documents), missing
        async with place.opened(settings, model, dataset) as here:
            await here.load(dataset.documents)
            search = Search(
                here.pool,
                here.es,
                QueryEmbedder(lambda: model, embed_seconds=60),
                timeouts=PATIENT,
                settings=RetrievalSettings(cached_queries=0, cosine_floor=-1),
            )
            results = {
                "follow-ups, for tuning": await run(search, dataset, FOLLOW_UPS[::2]),
                "follow-ups, held out": await run(search, dataset, FOLLOW_UPS[1::2]),
                "new questions": await run(search, dataset, new_questions()),
            }
        json.dump({**began, "results": results}, sys.stdout, indent=1)
        sys.stdout.write("\n")
    finally:
        await model.aclose()


if __name__ == "__main__":
    asyncio.run(main())
