"""``penstock ask``: for people and for programs, with a model and without."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import subprocess
from pathlib import Path
from uuid import UUID

import pytest

from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from tests.fakes.chat import FakeChat
from tests.fakes.collector import FakeCollector
from tests.support.processes import run_penstock
from tests.support.query.library import Library, WordEmbedder, document

pytestmark = pytest.mark.stack

QUESTION = "How is the reactor cooled by its pumps?"


def penstock(home: Path, *arguments: str, typed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return run_penstock(*arguments, env={**os.environ, "PENSTOCK_HOME": str(home), **environment}, typed=typed)


async def test_penstock_ask_prints_answers_as_text_and_json(stack: Stack, tmp_path: Path) -> None:
    async with Library.create(stack, WordEmbedder()) as library:
        await answers_people_and_programs(library, "acme", tmp_path)


async def answers_people_and_programs(library: Library, tenant: str, tmp_path: Path) -> None:
    mine = [f"user:{getpass.getuser()}"]
    await library.put(
        document("pumps.md", "The reactor is cooled by two pumps.", tenant=tenant, acl_tags=mine),
        document("ann.md", "The reactor pumps are red.", tenant=tenant, acl_tags=["user:ann"]),
    )
    library.write_home(tmp_path)
    where = ("--tenant", tenant, "--mode", "keyword")
    quoted = await asyncio.to_thread(penstock, tmp_path, "ask", QUESTION, *where, "--json")
    assert quoted.returncode == 0, quoted.stderr
    plain = json.loads(quoted.stdout)
    assert plain["answer"] == "> The reactor is cooled by two pumps. [1]"
    assert (plain["grounded"], plain["model"]) == (True, None)
    assert set(plain["citations"][0]) >= {"n", "chunk_id", "text", "source_url"}
    assert UUID(plain["answer_id"])

    async with FakeChat() as fake:
        model = {"PENSTOCK_CHAT_BASE_URL": fake.url, "PENSTOCK_CHAT_MODEL": fake.model}
        ann = ("--as", "ann", "--tenant", tenant, "--document", "ann.md")
        people = await asyncio.to_thread(lambda: penstock(tmp_path, "ask", QUESTION, *ann, **model))
        assert people.returncode == 0, people.stderr
        assert people.stdout.startswith("The reactor pumps are red. [1]\n")
        assert "[1] ann.md" in people.stdout
        assert "focused, copyist" in people.stdout
        assert "\x1b" not in people.stdout
        fake.faults.errors = 1
        failing = await asyncio.to_thread(lambda: penstock(tmp_path, "ask", QUESTION, *where, **model))
    assert failing.returncode == 0, failing.stderr
    assert "> The reactor is cooled by two pumps. [1]" in failing.stdout
    assert "note: the answering model failed" in failing.stdout
    recorded = await library.execute(
        "SELECT actor, access, credential, documents FROM trail.records"
        " WHERE tenant = %s AND action = 'answer' ORDER BY at",
        tenant,
    )
    pumps, anns = (document_id(tenant, "wiki", name) for name in ("pumps.md", "ann.md"))
    assert recorded == [
        (getpass.getuser(), access, "command", [shown])
        for access, shown in ((mine, pumps), (["user:ann"], anns), (mine, pumps))
    ]
    await converses(library, tenant, tmp_path)
    await check_traces_of_search_and_ask(tmp_path, tenant)
    missing = await asyncio.to_thread(penstock, tmp_path, "ask", QUESTION, *where, "--document", "no-such.md")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "no-such.md" in missing.stderr


async def converses(library: Library, tenant: str, home: Path) -> None:
    """Follow-up questions come from standard input, and each is understood by the questions before it."""
    await library.put(
        document("valves.md", "The valves of the reactor are inspected yearly.", tenant=tenant, acl_tags=["user:ann"])
    )
    ann = ("--as", "ann", "--tenant", tenant, "--mode", "keyword", "--conversation")
    typed = "\nAnd its valves?\n"
    said = await asyncio.to_thread(
        lambda: penstock(home, "ask", "What colour are the reactor pumps?", *ann, typed=typed)
    )
    assert said.returncode == 0, said.stderr
    first, _, second = said.stdout.partition("understood as: And its valves? (")
    assert "> The reactor pumps are red. [1]" in first
    assert "> The valves of the reactor are inspected yearly. [1]" in first
    assert "pumps" in second.partition(")")[0]
    refused = await asyncio.to_thread(lambda: penstock(home, "ask", "x", "--conversation", "--json"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "turns" in refused.stderr


async def check_traces_of_search_and_ask(home: Path, tenant: str) -> None:
    """A question from the command line begins a trace, as one over HTTP does, and gives nothing away."""
    async with FakeCollector() as collector, FakeChat() as chat:
        where = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "PENSTOCK_CHAT_BASE_URL": chat.url,
            "PENSTOCK_CHAT_MODEL": chat.model,
        }
        for command in ("search", "ask"):
            done = await asyncio.to_thread(
                lambda of: penstock(home, of, QUESTION, "--as", "ann", "--tenant", tenant, "--json", **where), command
            )
            assert done.returncode == 0, done.stderr
            json.loads(done.stdout)
        refused = await asyncio.to_thread(lambda: penstock(home, "search", "", **where))
        assert refused.returncode == 2
    for command, steps in (("search", {"access", "keywords", "verify", "arrange"}), ("ask", {"context", "chat"})):
        [root] = collector.named(command)
        assert (root.service, root.parent, root.failed) == (f"penstock-{command}", "", False)
        assert root.has(penstock_tenant=tenant)
        assert steps <= {span.name for span in collector.of(root.trace)}
    assert [[above.name for above in collector.above(wrote)] for wrote in collector.named("chat copyist")] == [
        ["chat", "ask"]
    ]
    assert len({span.trace for span in collector.spans if span.parent == ""}) == 2
    for word in (QUESTION, "reactor", "ann.md"):
        assert word.encode() not in b"".join(collector.raw)


@pytest.mark.parametrize("arguments", [["ask", ""], ["ask", "x", "--mode", "bm25"]])
async def test_penstock_ask_rejects_invalid_arguments(tmp_path: Path, arguments: list[str]) -> None:
    refused = penstock(tmp_path, *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Traceback" not in refused.stderr


async def test_penstock_ask_reports_an_unreachable_database_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "endpoints.json").write_text(
        json.dumps({"postgres": {"dsn": "postgresql://postgres@127.0.0.1:1/penstock"}})
    )
    away = penstock(tmp_path, "ask", "x", "--mode", "keyword")
    assert (away.returncode, away.stdout) == (1, "")
    assert len(away.stderr.splitlines()) == 1
    assert away.stderr.startswith("error: ")


async def test_a_stored_question_is_listed_shown_repeated_and_removed(stack: Stack, tmp_path: Path) -> None:
    async with Library.create(stack, WordEmbedder()) as library:
        tenant = "standing"
        made = document("pumps.md", "The reactor is cooled by two pumps.", tenant=tenant, acl_tags=["user:ann"])
        await library.put(made)
        library.write_home(tmp_path)

        async def run(*arguments: str) -> str:
            who = ("--tenant", tenant, "--as", "ann")
            done = await asyncio.to_thread(penstock, tmp_path, *arguments, *who)
            assert done.returncode == 0, done.stderr
            return done.stdout

        id_ = json.loads(await run("ask", QUESTION, "--mode", "keyword", "--keep", "--json"))["standing_id"]
        await library.put(
            made.model_copy(update={"version": made.version + 100, "content": "The reactor is cooled by three pumps."})
        )
        [listed] = json.loads(await run("standing", "list", "--json"))["standing"]
        assert (listed["id"], listed["changes"]) == (id_, [{"kind": "changed", "sentences": [1]}])
        assert "1. > The reactor is cooled by two pumps. [1]  [changed]" in await run("standing", "show", id_)
        assert (await run("standing", "ask", id_)).splitlines() == [
            "- > The reactor is cooled by two pumps. [1]",
            "+ > The reactor is cooled by three pumps. [1]",
            "wiki: no connector lists it; wait for what was published with --at-least",
        ]
        again = json.loads(await run("standing", "ask", id_, "--json"))
        assert [line["change"] for line in again["difference"]] == ["same"]
        assert [(source["source"], source["lags"]) for source in again["freshness"]] == [("wiki", ["unlisted"])]
        actions = await library.execute(
            "SELECT action, object FROM trail.records WHERE tenant = %s AND action LIKE 'standing%%' ORDER BY at",
            tenant,
        )
        expected = ["standing.read", "standing.ask", "standing.ask"]
        assert actions == [(action, f"question:{id_}") for action in expected]
        assert json.loads(await run("standing", "remove", id_, "--json")) == {"removed": id_}
        refused = await asyncio.to_thread(
            penstock, tmp_path, "standing", "show", id_, "--tenant", tenant, "--as", "ann"
        )
        assert refused.returncode == 1
        assert refused.stderr.splitlines()[-1].startswith("error: you have no such standing question")
        several = await asyncio.to_thread(penstock, tmp_path, "ask", QUESTION, "--keep", "--tag", "staff")
        assert (several.returncode, "needs one person" in several.stderr) == (2, True)
