"""The gate of ``penstock generation cutover``: the real command, a candidate whose model says nothing, and questions in
words that stand nowhere, so that the keywords cannot save it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.local.service import free_port
from deploy.local.stack import Stack
from query.evaluation import golden
from query.evaluation.generations import compare
from query.evaluation.golden import Golden, Judged
from tests.support.processes import run_penstock
from tests.support.query.generation_query_kit import Site
from tests.support.query.library import document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

PLACES = ("dale", "fen", "ridge", "moor", "cove", "heath", "glen", "marsh", "holt", "brook", "wold", "strand")
TEXTS = {f"{place}.md": f"The survey of the {place} tells of its birds and its soil." for place in PLACES}
QUESTIONS = {f"zq{n}x": f"{place}.md" for n, place in enumerate(PLACES[:6])}
"""Each with the one document that answers it, as the model of g1 knows and that of g3 does not."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def built(stack: Stack) -> AsyncIterator[Site]:
    async with Site.create(stack) as site:
        await site.put(*(document(name, text) for name, text in TEXTS.items()))
        site.models["g1"].near |= {question: TEXTS[name] for question, name in QUESTIONS.items()}
        yield site


@pytest_asyncio.fixture(loop_scope="module")
async def site(built: Site) -> Site:
    """g3 is ready to be cut over to, g1 is active, nothing is judged."""
    await built.state(g1="active", g3="building", g2="retired")
    await built.library.execute("TRUNCATE eval_queries, eval_judgements")
    built.models["g3"].near.clear()
    return built


async def judge(site: Site) -> None:
    async with site.library.pool.connection() as connection:
        for question, name in QUESTIONS.items():
            await golden.store(connection, Golden("acme", question, (Judged("wiki", name),), tags=("staff",)))


async def cutover(site: Site, home: Path, *options: str, **environment: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout, the lines on stderr. Nothing but the last line is an error, and where there is one, nothing
    was switched."""
    env = {**os.environ, **site.environment(home), **environment}
    done = await asyncio.to_thread(partial(run_penstock, "generation", "cutover", *options, env=env))
    lines = done.stderr.splitlines()
    said = [line.startswith("error: ") for line in lines]
    states = dict(await site.library.execute("SELECT name, state FROM generations WHERE name <> 'g2'"))
    if done.returncode == 0:
        assert not any(said), lines
        assert states == {"g1": "previous", "g3": "active"}
    else:
        assert said == [False] * (len(lines) - 1) + [True], lines
        assert done.stdout == ""
        assert states == {"g1": "active", "g3": "building"}
    return done.returncode, done.stdout, lines


async def test_a_cut_over_to_a_worse_generation_is_refused_with_both_measures_unless_forced(
    site: Site, tmp_path: Path
) -> None:
    await judge(site)
    comparison = await compare(site.settings, site.library.pool, "g3")
    before, after = comparison.before["nDCG@5"], comparison.after["nDCG@5"]
    assert before == 1.0, "g1 knows every answer"
    assert after < 0.7, "and no keyword saves g3"
    worse = f"nDCG@5 of generation g3 is {after:.3f}, {1 - after:.2%} below the 1.000 of g1"

    code, _, lines = await cutover(site, tmp_path)
    assert code == 1
    assert lines[-1] == f"error: {worse}: nothing was changed (at most 2 % is allowed; --force cuts over anyway)"

    code, out, lines = await cutover(site, tmp_path, "--force", "--json")
    assert code == 0
    assert lines[-1] == f"Forced: {worse}."
    done = json.loads(out)
    assert (done["active"], done["previous"], done["forced"]) == ("g3", "g1", True)
    assert done["evaluation"]["change"] == pytest.approx(after - 1)


async def test_a_cut_over_to_an_equally_good_generation_needs_no_force(site: Site, tmp_path: Path) -> None:
    await judge(site)
    site.models["g3"].near |= site.models["g1"].near
    code, out, lines = await cutover(site, tmp_path, "--json")
    assert (code, json.loads(out)["forced"]) == (0, False)
    assert not any("Forced" in line for line in lines)


async def test_a_cut_over_without_golden_questions_requires_no_evaluation_to_be_stated(
    site: Site, tmp_path: Path
) -> None:
    code, _, lines = await cutover(site, tmp_path)
    assert code == 1
    assert "penstock golden add" in lines[-1]
    assert "--no-evaluation" in lines[-1]
    assert (await cutover(site, tmp_path, "--no-evaluation"))[0] == 0


async def test_a_cut_over_with_pending_documents_is_refused_even_with_force(site: Site, tmp_path: Path) -> None:
    await judge(site)
    request_count = len(site.models["g3"].texts)
    ids = await site.library.accept(document("late.md", "The survey of the quarry came late."))
    await site.library.converge(*ids)
    await site.library.execute(
        "UPDATE index_state SET pending_since = now() - interval '2 minutes' WHERE generation = 'g3' AND seq < want_seq"
    )
    code, _, lines = await cutover(site, tmp_path, "--force")
    [line] = lines
    assert code == 1
    assert line.startswith("error: 1 document is not in both stores of generation g3 yet: nothing was changed.")
    assert len(site.models["g3"].texts) == request_count
    for library in site.libraries:
        await library.converge(*ids)


async def test_a_cut_over_succeeds_though_the_retired_generation_cannot_be_removed_yet(
    site: Site, tmp_path: Path
) -> None:
    await site.state(g1="active", g3="building", g2="previous")
    nobody = f"127.0.0.1:{free_port()}"
    code, out, lines = await cutover(site, tmp_path, "--no-evaluation", "--json", PENSTOCK_KAFKA_BOOTSTRAP=nobody)
    assert (code, json.loads(out)["retired"]) == (0, ["g2"])
    assert "Cut over. What is left of g2 is removed by the next build: " in lines[-1]


async def test_retiring_a_generation_succeeds_though_a_store_could_not_be_cleared(
    site: Site, stack: Stack, tmp_path: Path
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    env = {
        **os.environ,
        **site.environment(tmp_path),
        "PENSTOCK_ELASTICSEARCH_URL": nobody,
        "PENSTOCK_KAFKA_BOOTSTRAP": stack.endpoints()["kafka"]["bootstrap"],
    }
    done = await asyncio.to_thread(partial(run_penstock, "generation", "retire", "g3", "--json", env=env))
    lines = done.stderr.splitlines()
    assert done.returncode == 0, lines
    assert json.loads(done.stdout) == {"retired": "g3", "cleared": False}
    assert lines[-1].startswith(
        "Generation g3 is retired. What is left of it is removed by the next build, or by `penstock generation retire"
        " g3`: "
    )
    states = dict(await site.library.execute("SELECT name, state FROM generations"))
    assert states["g3"] == "retired"
