"""The faults of a history, their rates, and the errors that they raise."""

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
    "a pause after the first look": (0.05, 0.5),
    "a pause after cutting": (0.05, 0.5),
    "a pause before Kafka": (0.01, 0.2),
    "a pause before embedding": (0.05, 0.5),
    "a pause before the locks": (0.01, 0.2),
    "a pause before the bulk": (0.05, 0.5),
    "a pause after the bulk": (0.05, 0.5),
    "a pause after an announcement": (0.05, 0.5),
}
"""Kind of fault → the least and the greatest chance of one at each opportunity, in a history that has it."""
CONNECTED_RATES: dict[str, tuple[float, float]] = {
    "the source refuses": (0.01, 0.2),
    "a pause after asking": (0.02, 0.3),
    "a pause before saving": (0.02, 0.3),
    "killed before the intent": (0.05, 0.5),
    "killed before sending": (0.05, 0.5),
    "killed before saving": (0.05, 0.5),
    "taken over before the intent": (0.05, 0.5),
    "taken over before sending": (0.05, 0.5),
    "taken over before saving": (0.05, 0.5),
}
"""The same of those that only happen to connectors."""
SHARE = 0.35
"""The share of kinds that happen in a history with faults."""
PAUSE_SHARE = 0.15
"""The share of the kinds of pauses, of which there are many."""
CALM_SHARE = 0.15
"""The share of histories without faults, in which hints alone have to suffice."""
PAUSE_SECONDS = (2.0, 20.0, 150.0, 1_500.0, 6_000.0)
"""Longest pauses of a process: below and above a session (6), the server's memory of deletes (600) and the time within
which a bulk is sent (3,600)."""
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
    def drawn(
        cls, rng: Random, clock: Callable[[], float], without: Collection[str] = (), *, connected: bool = False
    ) -> Faults:
        rates = {}
        if rng.random() >= CALM_SHARE:
            for kind, (least, greatest) in (RATES | CONNECTED_RATES if connected else RATES).items():
                if rng.random() < (PAUSE_SHARE if kind.startswith("a pause") else SHARE):
                    rates[kind] = rng.uniform(least, greatest)
        rates = {kind: rate for kind, rate in rates.items() if kind not in without}
        return cls(Random(rng.getrandbits(64)), rates, clock=clock)

    def happens(self, kind: str) -> bool:
        """Return whether the fault happens this time."""
        rate = self.rates.get(kind)
        if rate is None or self.calm or self.rng.random() >= rate:
            return False
        self.happened[kind] += 1
        self.moments.append((self.clock(), kind))
        return True

    def pause(self, kind: str) -> float:
        """Seconds for which a whole process stands still; mostly none."""
        return self.rng.random() * self.rng.choice(PAUSE_SECONDS) if self.happens(kind) else 0.0

    def delay(self, kind: str) -> float:
        """Seconds; mostly none, now and then very many."""
        if not self.happens(kind):
            return 0.0
        longest = LONGEST_SECONDS[kind]
        return self.rng.uniform(0.0, longest) if self.rng.random() < 0.5 else self.rng.uniform(0.0, 2.0)
