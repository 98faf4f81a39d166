"""The quotas of tenants: their weights and daily budgets, from a file that is read again when it changes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.core.errors import Misconfigured

log = structlog.get_logger()

Amount = Annotated[float | None, Field(ge=0, allow_inf_nan=False)]
"""None: no limit."""


class Budget(BaseModel):
    """The budgets of a day in UTC."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_day: Amount = None
    tokens_per_day: Amount = None
    """The tokens that the chat model reads and writes."""
    money_per_day: Amount = None
    """The money for the chat model, reranking and embeddings of queries, by the configured prices."""

    @property
    def amounts(self) -> tuple[float | None, float | None, float | None]:
        return self.requests_per_day, self.tokens_per_day, self.money_per_day


class Quota(Budget):
    """The weight and budgets of a tenant."""

    weight: float = Field(1.0, gt=0, le=1_000)
    """The weight of its share among the tenants."""
    caller: Budget = Budget()
    """The budgets of each of its callers."""

    def over(self, default: Quota) -> Quota:
        """This quota, with unset fields taken from the default."""
        own = self.model_dump(exclude_unset=True, exclude={"caller"})
        caller = default.caller.model_copy(update=self.caller.model_dump(exclude_unset=True))
        return default.model_copy(update={**own, "caller": caller})


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    default: Quota = Quota()
    tenant: dict[str, Quota] = Field(default_factory=dict)


NONE = Quota()


class Quotas:
    """The current quotas of the file. If the file cannot be read any more, the quotas stay and the log reports it."""

    def __init__(self, path: Path | None) -> None:
        """path: None means no limits. Raises Misconfigured when the file cannot be read."""
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
    """The default quota, and the quotas of the tenants in the file. Raises ValueError (such as TOMLDecodeError)."""
    try:
        file = _File.model_validate(tomllib.loads(text))
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    return file.default, {name: quota.over(file.default) for name, quota in file.tenant.items()}
