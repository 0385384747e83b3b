"""Options of `fedcg simulate` that hold for every method or, as METHOD=..., for one of them; and its seeds."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from experiments.errors import OptionError
from experiments.settings.options import parse_params
from fedcg.learning.spec import ParameterValue

_Value = TypeVar("_Value")


def of_method(values: Mapping[str, Mapping[str, _Value]], method: str) -> dict[str, _Value]:
    """The values under a method's name, over those under "", which are every method's."""
    return {**values.get("", {}), **values.get(method, {})}


def parse_method_params(pairs: list[str], methods: tuple[str, ...]) -> dict[str, dict[str, ParameterValue]]:
    """Read `key=value` (every method's) and `METHOD.key=value` (one method's).

    Raises:
        OptionError: a pair without `=`, or of a method that is not run.
    """
    params: dict[str, dict[str, ParameterValue]] = {}
    for key, value in parse_params(pairs).items():
        method, dot, name = key.rpartition(".")
        if dot and method not in methods:
            raise OptionError(f"--set {key}: {method!r} is not one of the methods of this call ({', '.join(methods)})")
        params.setdefault(method, {})[name] = value
    return params


def parse_networks(typed: Mapping[str, Sequence[str]], methods: Collection[str]) -> dict[str, dict[str, str]]:
    """Read `NAME` (every method's) and `METHOD=NAME` (one method's) of the options that name networks.

    Args:
        typed: texts by option, a field of `RunSetting`: network, generator or discriminator.
        methods: those of the call.

    Returns:
        By method, and "" for every method, fields of `RunSetting`.

    Raises:
        OptionError: of a method that is not run, without a name, or twice for the same methods.
    """
    networks: dict[str, dict[str, str]] = {}
    for option, texts in typed.items():
        for text in texts:
            method, equals, name = text.rpartition("=")
            if equals and method not in methods:
                known = ", ".join(methods)
                raise OptionError(f"--{option} {text}: {method!r} is not one of the methods of this call ({known})")
            if not name:
                raise OptionError(f"--{option} {text!r}: write NAME, or METHOD=NAME for one method")
            if option in networks.setdefault(method, {}):
                raise OptionError(
                    f"--{option} {text}: given twice for {method or 'every method'}; leave one of them out"
                )
            networks[method][option] = name
    return networks


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read `0,1,2`, or a range `0-4`.

    Raises:
        OptionError: anything else.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(1000):
            raise OptionError(f"--seeds {text!r}: write numbers with commas between them, or a range such as 0-4")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(seeds)
