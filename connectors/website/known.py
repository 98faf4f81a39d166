"""Remembers the response to the last request for each page of a website, in a file."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SAVE_SECONDS = 60.0
"""Between two times that the responses to earlier requests are saved: those of 50,000 pages may take 300 MB."""
MAX_CANONICAL_HOPS = 10
"""Longer chains of copies are not followed: their pages are documents."""


@dataclass(slots=True)
class KnownPage:
    """The response to the last request for a page."""

    digest: str = ""
    etag: str | None = None
    last_modified: str | None = None
    no_index: bool = False
    is_missing: bool = False
    canonical: str | None = None
    """The address that stands for it: where it redirects to, or the one that it names."""
    lastmod: str | None = None
    """The sitemap's, at that time."""


class KnownPages:
    """The responses to earlier requests, by address. The file may be lost: pages are then requested again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._pages: dict[str, KnownPage] | None = None
        self._is_saved, self._saved_at = True, time.monotonic()
        self._saving = asyncio.Lock()
        """Two listings of one site may run at the same time, for example after ``penstock connector run --full``."""

    async def load(self) -> None:
        """Read the file, unless it was read already. Comes before everything else."""
        if self._pages is None:
            self._pages = await asyncio.to_thread(self._read)

    @property
    def _loaded(self) -> dict[str, KnownPage]:
        assert self._pages is not None
        return self._pages

    def get(self, url: str) -> KnownPage | None:
        return self._loaded.get(url)

    def put(self, url: str, page: KnownPage) -> None:
        self._loaded[url] = page
        self._is_saved = False

    def keep(self, urls: Collection[str]) -> None:
        """Forget all other pages."""
        self._pages = {url: page for url, page in self._loaded.items() if url in urls}

    def __len__(self) -> int:
        return len(self._loaded)

    def is_excluded(self, url: str, listed: Collection[str]) -> bool:
        """Return whether a page is no document: it says ``noindex``, or is a copy of a listed page that is one. A page
        of which nothing is known yet counts as a document; of pages that name each other, the first by address does."""
        known, chain = self._loaded, [url]
        if (page := known.get(url)) is not None and page.no_index:
            return True
        while (page := known.get(chain[-1])) is not None and (canonical := page.canonical) and canonical in listed:
            if len(chain) > MAX_CANONICAL_HOPS:
                return False
            if canonical in chain:
                return min(chain[chain.index(canonical) :]) != url
            if (target := known.get(canonical)) is not None and (target.no_index or target.is_missing):
                break
            chain.append(canonical)
        return chain[-1] != url

    @property
    def is_due(self) -> bool:
        """Return whether SAVE_SECONDS have passed since the last save."""
        return time.monotonic() - self._saved_at > SAVE_SECONDS

    async def save(self) -> None:
        """Write the file, if anything was put since."""
        async with self._saving:
            if not self._is_saved:
                self._is_saved, self._saved_at = True, time.monotonic()
                try:
                    await asyncio.to_thread(self._write, list(self._loaded.items()))
                except BaseException:
                    self._is_saved = False
                    raise
            self._saved_at = time.monotonic()

    def _read(self) -> dict[str, KnownPage]:
        """Blocks."""
        known: dict[str, KnownPage] = {}
        try:
            with self._file.open(encoding="utf-8") as file:
                for line in map(json.loads, file):  # the file of an earlier release is one object
                    for url, fields in line.items() if isinstance(line, dict) else [line]:
                        known[url] = KnownPage(**fields)
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
        return known

    def _write(self, pages: Sequence[tuple[str, KnownPage]]) -> None:
        """Write a line of JSON for each page. Blocks."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            for url, known in pages:
                file.write(json.dumps([url, asdict(known)], ensure_ascii=False) + "\n")
        part.replace(self._file)
