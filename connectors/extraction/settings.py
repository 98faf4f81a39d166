"""The settings of extraction, from ``PENSTOCK_EXTRACTION_<FIELD>``."""

from __future__ import annotations

import os
from functools import cache
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from connectors.extraction.limits import Limits
from pipeline.core.errors import Misconfigured
from pipeline.runtime.confinement import available

_DEFAULT = Limits()
WAIT_SECONDS = 30.0
"""Longest time that the extraction service makes a file wait for a free reader; then it responds that it is busy."""


class ExtractionSettings(BaseSettings):
    """How files are read. ``connectors.extraction.limits`` documents the limits and their sources."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_EXTRACTION_", frozen=True, extra="forbid")

    at_once: int = Field(
        default_factory=lambda: (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ),
        ge=1,
        le=256,
    )
    """Documents read at the same time; each may need ``memory_bytes``. Default: the number of processors. With ``ocr``,
    half as many scanned PDFs (at least one) are processed in addition."""
    max_file_bytes: int = Field(50_000_000, ge=1)
    """Largest PDF, Office or mail file. A larger one is refused unread."""
    memory_bytes: int = Field(_DEFAULT.memory_bytes, ge=256 * 1024**2)
    """The memory of one reading process."""
    cpu_seconds: int = Field(_DEFAULT.cpu_seconds, ge=1)
    """The processor time of one reading process."""
    wall_seconds: int = Field(_DEFAULT.wall_seconds, ge=1)
    """The time after which a reading process is killed."""
    pages: int = Field(_DEFAULT.pages, ge=1)
    """The most pages of a PDF, or slides of a deck, that are read."""
    cells: int = Field(_DEFAULT.cells, ge=1)
    """The most cells in all tables of a document that are read."""
    unconfined: Literal["refuse", "allow"] = "refuse"
    """How files are treated where the kernel offers no confinement (Landlock and seccomp): ``allow`` reads them in a
    process that, if a file takes it over, may do whatever its user may."""
    ocr: bool = False
    """Whether ``ocrmypdf``, if it is installed, recognises the text of scanned PDFs."""
    ocr_languages: str = Field("eng", pattern=r"^[A-Za-z_]{3,20}(\+[A-Za-z_]{3,20})*$")
    """Languages as ``ocrmypdf --language`` takes them, e.g. ``eng+deu``; each needs tesseract's data for it."""
    ocr_wall_seconds: int = Field(600, ge=1)
    """Wall-clock time for a whole PDF; a page takes a few seconds."""
    ocr_memory_bytes: int = Field(4 * 1024**3, ge=256 * 1024**2)
    """RLIMIT_AS of each OCR process: tesseract holds a page's picture and its models."""
    url: str | None = None
    """Address of an extraction service (`penstock extract serve`), ``http://host:port``, which reads PDF, Office and
    mail files instead of this process. Configure both alike: the client derives its timeout from its own settings."""
    ca_certs: str | None = None
    """File of certificate authorities for an ``https`` address. Default: those that httpx trusts."""
    host: str = "127.0.0.1"
    """Host on which `penstock extract serve` listens."""
    port: int = Field(8070, ge=0, le=65535)
    """Port on which `penstock extract serve` listens; 0: any free one."""
    waiting: int = Field(8, ge=0, le=1000)
    """Requests that the service accepts in addition to the ``at_once`` that it works on; each is a file on its disk.
    Further ones get 503 with a Retry-After."""
    body_seconds: float = Field(60.0, gt=0)
    """Longest time for a file to arrive at the service, and again for its text to be fetched."""

    @model_validator(mode="after")
    def _is_an_address(self) -> Self:
        """Check the address. The error does not show the value, which may hold a password."""
        if self.url is not None:
            parts = urlsplit(self.url)
            is_plain = not (parts.username or parts.query or parts.fragment or parts.path.strip("/"))
            if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain or parts.port == 0:
                raise ValueError("URL is not the address of a service: write http://host:port and nothing else")
        return self

    @property
    def ocr_at_once(self) -> int:
        """Scanned PDFs that OCR processes at the same time, in addition to ``at_once`` documents that are read."""
        return max(1, self.at_once // 2)

    @property
    def response_seconds(self) -> float:
        """Longest time from the first byte of a request to the last of its response: an Office file is read by two
        processes, and a scanned PDF before and after OCR."""
        reading = 2 * self.wall_seconds + (self.ocr_wall_seconds + WAIT_SECONDS if self.ocr else 0)
        return 2 * self.body_seconds + WAIT_SECONDS + reading + 10

    def limits(self) -> Limits:
        return Limits(
            memory_bytes=self.memory_bytes,
            cpu_seconds=self.cpu_seconds,
            wall_seconds=self.wall_seconds,
            pages=self.pages,
            cells=self.cells,
        )

    def ocr_limits(self) -> Limits:
        """The limits of OCR. Those of memory and CPU hold for each process; tesseract starts one for each page."""
        return Limits(
            memory_bytes=self.ocr_memory_bytes,
            cpu_seconds=self.ocr_wall_seconds,
            wall_seconds=self.ocr_wall_seconds,
            written_bytes=1024**3,
            open_files=1024,
        )


@cache
def from_environment() -> ExtractionSettings:
    """Read the settings once. Raises Misconfigured."""
    try:
        return ExtractionSettings()
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_input=False)[0]
        name = "_".join(["PENSTOCK_EXTRACTION", *map(str, first_error["loc"])]).upper()
        raise Misconfigured(f"{name}: {first_error['msg']}") from error


def confinement() -> dict[str, str]:
    """Describe how files are read by processes of this machine (``files``: confined, refused or unconfined), and what
    its kernel offers (``kernel``). Raises Misconfigured."""
    otherwise = {"refuse": "refused", "allow": "unconfined"}[from_environment().unconfined]
    return {"files": "confined" if available().is_complete else otherwise, "kernel": str(available())}
