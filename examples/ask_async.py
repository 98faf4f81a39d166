"""Many searches at once with the asynchronous client: ``python examples/ask_async.py URL TOKEN_FILE QUERY…``."""

import asyncio
import sys
from pathlib import Path

from penstock.client import AsyncClient, SearchFilters


async def main(url: str, token_file: str, *queries: str) -> None:
    async def token() -> str:
        """As from an identity provider. The client calls it again before the token expires, and after a 401."""
        line = await asyncio.to_thread(Path(token_file).read_text)
        return line.strip().removeprefix("Authorization: Bearer ")

    async with AsyncClient(url, token) as client:
        caller, facets = await asyncio.gather(client.me(), client.facets())
        print(f"{caller.principal} may read documents of {', '.join(facets.sources)}")
        filters = SearchFilters(sources=facets.sources[:1])
        responses = await asyncio.gather(*(client.search(query, top=1, filters=filters) for query in queries))
        for query, response in zip(queries, responses, strict=True):
            best = response.results[0].citation() if response.relevant else "nothing relevant"
            print(f"{query} → {best}")


asyncio.run(main(*sys.argv[1:]))
