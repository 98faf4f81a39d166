"""The resources that reading one document may use."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.runtime.confinement import ResourceLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(ResourceLimits):
    """The limits of one reading process. Those without a source are many times what ordinary documents need."""

    memory_bytes: int = 1024**3
    """RLIMIT_AS. A PDF of 2,000 pages with tables stays below a third of it."""
    cpu_seconds: int = 60
    """RLIMIT_CPU; 2,000 pages of text take about half."""
    wall_seconds: int = 90
    """Wall-clock time after which the process and its whole session are killed."""
    written_bytes: int = 64 * 1024**2
    """RLIMIT_FSIZE: the largest file it may write, its answer among them."""
    open_files: int = 64
    """RLIMIT_NOFILE."""
    text_bytes: int = 4 * 1024**2
    """Equal to ``topics.messages.MAX_CONTENT_BYTES``: a larger text could not be published."""
    pages: int = 2_000
    """Pages of a PDF, or slides of a deck."""
    cells: int = 200_000
    """Cells in all sheets of a workbook, or in all tables of another document. The rest is left out, and marked so."""
    table_seconds: float = 15.0
    """CPU time after which a PDF's remaining pages are not searched for tables: their text stays, as lines."""
    zip_entries: int = 10_000
    """Ten times Apache POI's ``ZipSecureFile.setMaxFileCount`` default: decks with many pictures exceed that one."""
    zip_bytes: int = 512 * 1024**2
    """Total size of all parts, unpacked."""
    zip_ratio: int = 100
    """Apache POI's ``ZipSecureFile.setMinInflateRatio`` default (0.01), turned around."""
    zip_grace_bytes: int = 1024**2
    """Parts smaller than this may compress as well as they like (POI: ``setGraceEntrySize``, 100 KB)."""
