"""Where a query finds one document, as the people named see it; without any, as somebody who may read it."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.errors import PenstockError
from pipeline.ledger.story_shape import Found, Story
from pipeline.settings import Settings, dist
from query.access import Caller
from query.embedders import GenerationEmbedders
from query.model import MAX_TOP, RANKERS, BadQuery, Result
from query.model import Found as Answer
from query.retrieval import open_search
from query.settings import load as load_query


async def find(settings: Settings, told: Story, query: str, principals: Sequence[str], tags: Sequence[str]) -> Found:
    """Among the first MAX_TOP passages. Raises BadQuery."""
    assert told.document is not None
    identity = told.document.identity
    embedders = GenerationEmbedders.by_settings(settings.embedding, dist() / "models")
    embedders.start()
    try:
        async with open_search(settings, embedders, load_query()) as library:
            if principals or tags:
                caller = await library.identify(identity.tenant, principals=principals, tags=tags)
            else:
                caller = Caller(identity.tenant, frozenset((*told.access.acl_tags, *told.access.required_tags)))
            answer = await library.search(query, caller, top=MAX_TOP)
    except BadQuery:
        raise
    except PenstockError as error:
        return Found(query, None, 0, {}, f"the search itself failed: {error}")
    mine = (identity.source, identity.external_id)
    for rank, result in enumerate(answer.results, start=1):
        if mine in _documents(result):
            return Found(query, rank, len(answer.results), {ranker: result.ranks.get(ranker) for ranker in RANKERS})
    return Found(query, None, len(answer.results), {}, _why_not(answer))


def _documents(result: Result) -> set[tuple[str, str]]:
    """It, and those that say the same."""
    return {(one.source, one.external_id) for one in (result.passage, *result.also)}


def _why_not(answer: Answer) -> str:
    less = f" ({'; '.join(answer.degraded)})" if answer.degraded else ""
    if not answer.relevant:
        return f"nothing that is about the question was found{less}"
    if len(answer.results) < MAX_TOP:
        return f"no passage of it is near the question, and they found {len(answer.results)} others{less}"
    return f"{MAX_TOP} passages of other documents are nearer to the question{less}"
