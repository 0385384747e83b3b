"""Weighted sums of tensors that are the same bit for bit whatever the order of their terms.

A floating-point sum depends on the order of its terms, so updates could only be summed once all of them are there. Integer
addition does not: every term is rounded ONCE to a multiple of 2^-32, by itself, and is added in two 64-bit integers.

Why nothing overflows: a term is held within ±2^52, so its coarse limb (units of 2^10) is at most 2^42 and its fine limb (units of
2^-32, of a rest of at most 2^9) at most 2^41; `MOST_TERMS` = 2^20 of them stay below 2^62.
Why it is precise enough: a term n x is off by at most 2^-33, so a mean Σ n x / Σ n with counts n >= 1 is off by at most
2^-33 ≈ 1.2e-10; half a unit in the last place of a float32 is larger for every value above 0.002.
"""

from __future__ import annotations

import torch

from fedcg.learning.method import DivergedError

MOST_TERMS = 1 << 20
_COARSE = 2.0**10
_FINE = 2.0**-32
_LIMIT = (
    2.0**52
)  # a weight of 1e6 examples times a value of 4e9: whatever is larger is broken or hostile, and saturates


class ExactSum:
    """Σ_i w_i x_i of float tensors of one shape, on the CPU; a function of the terms alone, not of their order."""

    def __init__(self) -> None:
        self._coarse: torch.Tensor | None = None
        self._fine = torch.zeros(())
        self._terms = 0

    def add(self, values: torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Add one term.

        Args:
            values: float tensor.
            weight: w_i >= 0, a number or a tensor that broadcasts to `values`; whole numbers (counts) lose nothing.

        Raises:
            DivergedError: a value is not finite.
            OverflowError: more than `MOST_TERMS` terms.
        """
        if self._terms == MOST_TERMS:
            raise OverflowError(f"an exact sum has room for {MOST_TERMS} terms")
        term = values.detach().to("cpu", torch.float64) * weight
        if not term.isfinite().all():
            raise DivergedError("a weight or an output of an update is not finite")
        term = term.clamp(-_LIMIT, _LIMIT)
        coarse = torch.round(term / _COARSE)
        fine = term.sub_(coarse, alpha=_COARSE).div_(_FINE).round_()
        if self._coarse is None:
            self._coarse, self._fine = coarse.to(torch.int64), fine.to(torch.int64)
        else:
            self._coarse += coarse.to(torch.int64)
            self._fine += fine.to(torch.int64)
        self._terms += 1

    def value(self) -> torch.Tensor:
        """The sum as float64, of the terms' shape.

        Raises:
            ValueError: nothing was added.
        """
        if self._coarse is None:
            raise ValueError("nothing was added to this sum")
        return self._coarse.to(torch.float64).mul_(_COARSE).add_(self._fine.to(torch.float64), alpha=_FINE)
