"""Which faults a history has, how often, and what is thrown when one happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random

RATES: dict[str, tuple[float, float]] = {
    "postgres refuses": (0.002, 0.05),
    "a commit's answer is lost": (0.01, 0.15),
    "kafka refuses": (0.01, 0.2),
    "kafka keeps silent": (0.01, 0.2),
    "kafka is slow": (0.02, 0.3),
    "a commit is lost": (0.05, 0.5),
    "elasticsearch refuses": (0.01, 0.2),
    "an answer of elasticsearch is lost": (0.02, 0.3),
    "a bulk is late": (0.05, 0.4),
    "the model fails": (0.02, 0.3),
    "a slow step": (0.01, 0.2),
}
"""Kind of fault → the least and the greatest chance of one at each opportunity, in a history that has it."""
SHARE = 0.35
"""Of the kinds, in a history that has faults at all."""
CALM_SHARE = 0.15
"""Of histories without any: there, hints alone have to suffice."""
LONGEST_SECONDS = {"kafka is slow": 20.0, "a bulk is late": 1_800.0, "a slow step": 90.0}


@dataclass
class Faults:
    """The dice of one history."""

    rng: Random
    rates: dict[str, float] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)
    moments: list[tuple[float, str]] = field(default_factory=list)
    """When which of them happened."""
    calm: bool = False
    """No more faults from now on."""
    clock: Callable[[], float] = lambda: 0.0

    @classmethod
    def drawn(cls, rng: Random, clock: Callable[[], float], without: Collection[str] = ()) -> Faults:
        rates = {}
        if rng.random() >= CALM_SHARE:
            for kind, (least, greatest) in RATES.items():
                if rng.random() < SHARE:
                    rates[kind] = rng.uniform(least, greatest)
        rates = {kind: rate for kind, rate in rates.items() if kind not in without}
        return cls(Random(rng.getrandbits(64)), rates, clock=clock)

    def happens(self, kind: str) -> bool:
        """Whether it happens this time."""
        rate = self.rates.get(kind)
        if rate is None or self.calm or self.rng.random() >= rate:
            return False
        self.happened[kind] += 1
        self.moments.append((self.clock(), kind))
        return True

    def delay(self, kind: str) -> float:
        """Seconds; mostly none, now and then very many."""
        if not self.happens(kind):
            return 0.0
        longest = LONGEST_SECONDS[kind]
        return self.rng.uniform(0.0, longest) if self.rng.random() < 0.5 else self.rng.uniform(0.0, 2.0)
