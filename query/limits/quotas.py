"""What each tenant may have: its weight among tenants, and its budgets by day. A file, read again when it changes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.core.errors import Misconfigured

log = structlog.get_logger()

Amount = Annotated[float | None, Field(ge=0)]
"""None: no limit."""


class Budget(BaseModel):
    """Of a day, UTC."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_day: Amount = None
    tokens_per_day: Amount = None
    """That the chat model reads and writes."""
    money_per_day: Amount = None
    """For the chat model, reranking and the questions' embeddings, by the prices that are set for them."""

    @property
    def amounts(self) -> tuple[float | None, float | None, float | None]:
        return self.requests_per_day, self.tokens_per_day, self.money_per_day


class Quota(Budget):
    """A tenant's."""

    weight: float = Field(1.0, gt=0, le=1_000)
    """Of its share, beside other tenants'."""
    caller: Budget = Budget()
    """Of each of its callers."""

    def over(self, default: Quota) -> Quota:
        """With what is not said here taken from the default."""
        own = self.model_dump(exclude_unset=True, exclude={"caller"})
        caller = default.caller.model_copy(update=self.caller.model_dump(exclude_unset=True))
        return default.model_copy(update={**own, "caller": caller})


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    default: Quota = Quota()
    tenant: dict[str, Quota] = Field(default_factory=dict)


NONE = Quota()


class Quotas:
    """Those of the file as it is now. One that cannot be read any more changes nothing, and the log says so."""

    def __init__(self, path: Path | None) -> None:
        """None: nobody has a limit. Raises Misconfigured when it cannot be read."""
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._known: dict[str, Quota] = {}
        self._default = NONE
        self._error = ""
        if path is not None:
            self._read(path)
            if self._error:
                raise Misconfigured(f"PENSTOCK_SERVE_LIMITS_FILE: {path}: {self._error}")

    def of(self, tenant: str) -> Quota:
        if self._path is not None:
            self._read(self._path)
        return self._known.get(tenant, self._default)

    def _read(self, path: Path) -> None:
        before, self._error = self._error, ""
        try:
            stat = path.stat()
            signature = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if signature == self._seen:
                self._error = before
                return
            self._seen = signature
            self._default, self._known = parse(path.read_text())
            log.info("limits_file_read", path=str(path), tenants=len(self._known))
        except OSError as error:
            self._seen, self._error = None, error.strerror or "cannot be read"
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            self._error = "not valid TOML"
        except ValueError as error:
            self._error = str(error)
        if self._error and self._error != before:
            log.error("limits_file_unreadable", path=str(path), error=self._error)


def parse(text: str) -> tuple[Quota, dict[str, Quota]]:
    """The default, and those of the tenants that are named. Raises ValueError (TOMLDecodeError among them)."""
    try:
        file = _File.model_validate(tomllib.loads(text))
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    return file.default, {name: quota.over(file.default) for name, quota in file.tenant.items()}
