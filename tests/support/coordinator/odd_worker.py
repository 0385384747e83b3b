"""A worker that measures that device c goes the other way."""

from collections.abc import Container, Mapping
from typing import Any

from coordinator.aggregation.jobs import Assessed
from coordinator.updates.robustness import Figures
from tests.support.coordinator.world import PlainWorker

FINE, ODD = Figures(1.0, 0.6, 0.6), Figures(3.5, -0.5, 0.6)
REASON = "its step points away from the others' (cosine -0.50, median 0.60, at least 0.30)"
TOO_LONG = "its step is 3.5 times as long as the median (at most 3)"


class OddC(PlainWorker):
    """Measures that c goes the other way; in every round without `rounds`."""

    def __init__(self, *arguments: Any, rounds: Container[int] = range(1, 1000)) -> None:
        super().__init__(*arguments)
        self._odd_rounds = rounds

    def assess(self, updates: Mapping[str, str]) -> None:
        assert self.job is not None
        self.asked.append(("assess", tuple(updates)))
        figures = {client: ODD if client == "c" and self.job.round in self._odd_rounds else FINE for client in updates}
        self._reply(Assessed(self.job.round, self.job.attempt, figures))
