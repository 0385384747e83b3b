"""The choices of an audit, read and checked without torch: attacks by name, the conditions of a gate, the required packages."""

import re
from importlib.util import find_spec
from typing import get_args

from audit.errors import GateFormError
from fedcg.values import Value
from fedcg.wire.parts import AuditFigure

ATTACKS = {
    "labels": "label_distribution",
    "inversion": "gradient_inversion",
    "reidentification": "reidentification",
    "membership": "membership",
    "class_inference": "class_inference",
    "memorisation": "generator_memory",
    "image_generator": "image_generator",
    "epsilon": "canaries",
}
"""The attacks by name, in the order of a report; each value is a module of `audit.attacks`."""
PACKAGES = {
    "jinja2": "jinja2",
    "scipy": "scipy",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "torch": "torch",
}
EXTRA = "fedcg-edge[audit]"
_CONDITION = re.compile(r"\s*([a-z][a-z0-9_]*?)(_gain)?\s*<\s*(-?\d+(?:\.\d+)?)\s*")
_LOW_IS_LEAK = ("label_l1",)  # an error of the attacker: their gain is positive for a leak
FIGURES: tuple[AuditFigure, ...] = get_args(AuditFigure)


class Condition(Value):
    """`NAME<BOUND` or `NAME_gain<BOUND`."""

    figure: str
    of_gain: bool
    bound: float

    def __str__(self) -> str:
        """Return the condition as it is written."""
        return f"{self.figure}{'_gain' if self.of_gain else ''}<{self.bound:g}"


def parse_gate(text: str) -> tuple[Condition, ...]:
    """Parse conditions, separated by commas: `reid_gain<0.1,mia_auc<0.75`.

    Raises:
        GateFormError: names the condition that is malformed or has an unknown figure, or bounds an error from above.
    """
    found = []
    for piece in filter(str.strip, text.split(",")):
        matched = _CONDITION.fullmatch(piece)
        if matched is None:
            raise GateFormError(f"gate {piece.strip()!r}: write NAME<NUMBER or NAME_gain<NUMBER, separated by commas")
        if matched[1] not in FIGURES:
            raise GateFormError(f"gate {piece.strip()!r}: no figure {matched[1]!r}; choose {', '.join(FIGURES)}")
        if matched[1] in _LOW_IS_LEAK and not matched[2]:
            raise GateFormError(
                f"gate {piece.strip()!r}: a small {matched[1]} is a leak, so this condition would stop the harmless updates; "
                f"write {matched[1]}_gain<NUMBER"
            )
        found.append(Condition(matched[1], matched[2] is not None, float(matched[3])))
    return tuple(found)


def missing_packages() -> tuple[str, ...]:
    """Return the packages that an audit needs and that are not installed, by their names for pip."""
    return tuple(package for module, package in PACKAGES.items() if find_spec(module) is None)
