"""The conditions of a gate, read from text. Torch-free: an agent reads its configuration with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from audit.errors import GateFormError
from fedcg.wire.parts import AuditFigure

_CONDITION = re.compile(r"\s*([a-z][a-z0-9_]*?)(_gain)?\s*<\s*(-?\d+(?:\.\d+)?)\s*")
FIGURES: tuple[AuditFigure, ...] = get_args(AuditFigure)


@dataclass(frozen=True)
class Condition:
    """`NAME<BOUND` or `NAME_gain<BOUND`."""

    figure: str
    of_gain: bool
    bound: float

    def __str__(self) -> str:
        """As it is written."""
        return f"{self.figure}{'_gain' if self.of_gain else ''}<{self.bound:g}"


def parse_gate(text: str) -> tuple[Condition, ...]:
    """Read conditions, separated by commas: `reid_gain<0.02,mia_auc<0.60`.

    Raises:
        GateFormError: not of this form, or a figure that there is not; names it.
    """
    found = []
    for piece in filter(str.strip, text.split(",")):
        matched = _CONDITION.fullmatch(piece)
        if matched is None:
            raise GateFormError(f"gate {piece.strip()!r}: write NAME<NUMBER or NAME_gain<NUMBER, separated by commas")
        if matched[1] not in FIGURES:
            raise GateFormError(f"gate {piece.strip()!r}: no figure {matched[1]!r}; there are {', '.join(FIGURES)}")
        found.append(Condition(matched[1], matched[2] is not None, float(matched[3])))
    return tuple(found)
