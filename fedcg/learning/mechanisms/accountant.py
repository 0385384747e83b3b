"""The (ε, δ) that a client's DP-SGD has spent: a value that is kept across rounds, and the question before each of them.

Accounting is Opacus' for Rényi DP of the subsampled Gaussian mechanism (Mironov et al., 2019).
"""

from __future__ import annotations

import functools
import json
import warnings
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcg.learning.errors import PrivacyError
from fedcg.learning.mechanisms.dp_sgd import private_step_count, sampling_rate
from fedcg.learning.method import Method, TrainingParams
from fedcg.learning.privacy import DpSgdSettings

_FORMAT = 1


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    noise_multiplier: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sample_rate: Annotated[float, Field(gt=0, le=1)]
    steps: Annotated[int, Field(ge=1)]


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Annotated[int, Field(ge=_FORMAT, le=_FORMAT)] = _FORMAT
    spent: Annotated[list[_Entry], Field(max_length=100_000)]


@functools.lru_cache(maxsize=1024)  # half a second on a busy CPU, and the same for every round of a client
def _loss_of_a_step(noise_multiplier: float, sample_rate: float) -> tuple[float, ...]:
    """Rényi divergence of one step at each of Opacus' orders."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = RDPAccountant.DEFAULT_ALPHAS
    losses = compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)
    return tuple(map(float, losses))


@dataclass(frozen=True)
class Spent:
    """What was spent so far.

    Attributes:
        entries: (noise multiplier, sampling rate, steps), each pair of the first two once.
    """

    entries: tuple[tuple[float, float, int], ...] = ()

    def epsilon(self, delta: float) -> float:
        """ε at δ = `delta`; 0 where nothing was spent."""
        if not self.entries:
            return 0.0
        from opacus.accountants import RDPAccountant
        from opacus.accountants.analysis.rdp import get_privacy_spent

        columns = [[steps * loss for loss in _loss_of_a_step(noise, rate)] for noise, rate, steps in self.entries]
        total = [sum(losses) for losses in zip(*columns, strict=True)]
        with warnings.catch_warnings():
            # At the ends of Opacus' list of orders ε is an upper bound still, only not the tightest.
            warnings.filterwarnings("ignore", message="Optimal order is the (smallest|largest) alpha")
            epsilon, _ = get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=total, delta=delta)
        return float(epsilon)

    def with_round(self, settings: DpSgdSettings, sample_rate: float, steps: int) -> Spent:
        """What is spent after so many more steps."""
        if not steps:
            return self
        counted = {(noise, rate): count for noise, rate, count in self.entries}
        key = (settings.noise_multiplier, sample_rate)
        counted[key] = counted.get(key, 0) + steps
        return Spent(tuple((noise, rate, count) for (noise, rate), count in counted.items()))

    def exceeds(self, settings: DpSgdSettings) -> bool:
        """Whether this is more than the budget; asked of what WOULD be spent, before a round."""
        return settings.budget_epsilon is not None and self.epsilon(settings.delta) > settings.budget_epsilon

    def to_json(self) -> str:
        """For a file; `from_json` reads it back."""
        entries = [_Entry(noise_multiplier=noise, sample_rate=rate, steps=steps) for noise, rate, steps in self.entries]
        return _Stored(spent=entries).model_dump_json()

    @staticmethod
    def from_json(text: str) -> Spent:
        """What `to_json` wrote.

        Raises:
            PrivacyError: it is something else. What was spent is then unknown: do not go on as if it were nothing.
        """
        try:
            stored = _Stored.model_validate(json.loads(text))
        except (ValueError, ValidationError) as error:
            raise PrivacyError(f"not a record of spent privacy: {error}") from error
        return Spent(tuple((entry.noise_multiplier, entry.sample_rate, entry.steps) for entry in stored.spent))


def after_round(spent: Spent, settings: DpSgdSettings, method: Method, params: TrainingParams, rows: int) -> Spent:
    """What is spent after one more local round.

    Args:
        spent: before it.
        settings: of the round.
        method: each of its `private_stages` takes as many steps.
        params: of the method.
        rows: training images; without any nothing is trained.
    """
    if not rows:
        return spent
    steps = method.private_stages * private_step_count(params, rows)
    return spent.with_round(settings, sampling_rate(rows, params.batch_size), steps)
