"""The baseline of the running service: the accepted value of each golden question.

The first value of a question is its baseline, until an operator accepts newer ones. The baseline stays where it is
however slowly the results decline, and a question that has none is not compared
(docs/adr/0079-trustworthy-evaluation.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
from psycopg.types.json import Jsonb

from pipeline.stores.postgres import Connection
from query.access.tenant_rows import set_tenant
from query.evaluation.golden import Golden
from query.evaluation.measures import randomisation_test

WORST_RATIO, SIGNIFICANT = -0.02, 0.05
"""The relative change below which, and the p below which, a change is a decline. A cut-over may lose as much."""

Key = tuple[str, str]
"""A slice and a measure."""


@dataclass(frozen=True, slots=True)
class Value:
    """A question's value of one measure."""

    value: float
    digest: str
    """The ``digest`` of its judgements; values of different digests are not comparable."""


@dataclass(frozen=True, slots=True)
class Change:
    """A measure compared with the baseline, over the questions that have a comparable one."""

    ratio: float
    """Relative: -0.05 is 5 % worse. 0 if the baseline is 0 or there is no such question."""
    p: float
    """The p-value by a paired, two-sided randomisation test; 1 without such a question."""
    questions: int
    accepted: float
    """The mean of all questions' accepted values, where a new question has its present one."""

    @property
    def is_decline(self) -> bool:
        """True if the change is large and significant enough for an alert (deploy/prometheus/alerts.yml)."""
        return self.ratio < WORST_RATIO and self.p < SIGNIFICANT


Values = Mapping[UUID, Mapping[str, Value]]
"""By question and measure."""


def digest(golden: Golden, judge: str | None = None) -> str:
    """A digest of the current judgements, of who asks and, for an answer's measures, of the reference and the judging
    model."""
    judged = sorted((j.source, j.external_id, j.anchor, j.gain) for j in golden.judged)
    by = [judged, sorted(golden.principals), sorted(golden.tags), *([] if judge is None else [golden.reference, judge])]
    return hashlib.sha256(json.dumps(by).encode()).hexdigest()[:16]


def unaccepted(values: Values, baseline: Values) -> dict[UUID, dict[str, Value]]:
    """The values that have no comparable baseline: those of new questions, and of new judgements."""
    return {
        id_: new
        for id_, measured in values.items()
        if (new := {name: v for name, v in measured.items() if _accepted(baseline, id_, name, v) is None})
    }


def changes(values: Values, baseline: Values, slices: Mapping[UUID, Iterable[str]]) -> dict[Key, Change]:
    """The change of each measure in each slice."""
    pairs: dict[Key, list[tuple[float, float | None]]] = {}
    for id_, measured in values.items():
        for name, now in measured.items():
            before = _accepted(baseline, id_, name, now)
            for slice_ in slices[id_]:
                pairs.setdefault((slice_, name), []).append((now.value, None if before is None else before.value))
    return {key: _change(values) for key, values in pairs.items()}


def _accepted(baseline: Values, id_: UUID, name: str, now: Value) -> Value | None:
    before = baseline.get(id_, {}).get(name)
    return before if before is not None and before.digest == now.digest else None


def _change(pairs: Sequence[tuple[float, float | None]]) -> Change:
    """pairs: the present and the accepted value of each question."""
    accepted = float(np.mean([now if before is None else before for now, before in pairs]))
    compared = np.array([(now, before) for now, before in pairs if before is not None], dtype=np.float64).reshape(-1, 2)
    now, before = compared[:, 0], compared[:, 1]
    ratio = float(now.sum() / before.sum() - 1) if before.sum() > 0 else 0.0
    return Change(ratio, randomisation_test(now - before), len(compared), accepted)


# Postgres


async def load(connection: Connection, golden: Iterable[Golden]) -> dict[UUID, dict[str, Value]]:
    """The baseline of each of these questions that has one. Raises psycopg.Error."""
    loaded = {}
    for tenant, ids in _by_tenant(golden).items():
        await set_tenant(connection, tenant)
        cursor = await connection.execute(
            "SELECT id, baseline FROM eval_queries WHERE id = ANY(%s) AND baseline IS NOT NULL", [ids]
        )
        for id_, baseline in await cursor.fetchall():
            loaded[id_] = {name: Value(value, by) for name, (value, by) in baseline.items()}
    return loaded


async def accept(connection: Connection, golden: Iterable[Golden], values: Values) -> None:
    """Make these values the baseline of their questions; other measures keep theirs. golden: at least the questions of
    the values. Raises psycopg.Error."""
    async with connection.transaction(), connection.cursor() as cursor:
        for tenant, ids in _by_tenant(golden).items():
            await set_tenant(connection, tenant)
            await cursor.executemany(
                "UPDATE eval_queries SET baseline = coalesce(baseline, '{}') || %s WHERE id = %s",
                [
                    (Jsonb({name: [v.value, v.digest] for name, v in values[id_].items()}), id_)
                    for id_ in ids
                    if id_ in values
                ],
            )


def _by_tenant(golden: Iterable[Golden]) -> dict[str, list[UUID]]:
    ids: dict[str, list[UUID]] = {}
    for question in golden:
        ids.setdefault(question.tenant, []).append(question.id)
    return ids
