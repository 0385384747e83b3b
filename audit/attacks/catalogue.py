"""The attacks there are, by name, in the order of a report. A module is imported when its attack is asked for; this one is torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from audit.errors import UnknownAttackError

if TYPE_CHECKING:
    from audit.attacks.attack import Attack  # loads torch

_MODULES = {
    "labels": "label_distribution",
    "inversion": "gradient_inversion",
    "reidentification": "reidentification",
    "membership": "membership",
    "class_inference": "class_inference",
    "memorisation": "generator_memory",
    "image_generator": "image_generator",
    "extractor": "extractor_recovery",
    "epsilon": "canaries",
}
ATTACKS = tuple(_MODULES)


def get_attack(name: str) -> Attack:
    """The attack of that name.

    Raises:
        UnknownAttackError: there is none; the message lists those there are.
    """
    if name not in _MODULES:
        raise UnknownAttackError(f"no attack {name!r}; there are {', '.join(ATTACKS)}")
    attack: Attack = import_module(f"audit.attacks.{_MODULES[name]}").ATTACK
    return attack


def chosen_attacks(names: Sequence[str]) -> tuple[Attack, ...]:
    """The attacks of these names in the order of a report, each once; all where none is named."""
    wanted = {get_attack(name).name for name in names} if names else set(ATTACKS)
    return tuple(get_attack(name) for name in ATTACKS if name in wanted)
