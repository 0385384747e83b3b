"""Bytes per update against accuracy, for runs that differ in the generator alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from experiments.batch import RunSetting
from experiments.papers.lines import Figure, figure_of
from experiments.papers.records import RunRecord

# What a choice of the generator changes, and what tells no run from another.
_FREE = frozenset({"generator", "discriminator", "noise_dim", "seed", "paper", "threads", "device"})


@dataclass(frozen=True)
class Traffic:
    """One generator in one setting.

    Attributes:
        setting: what the compared runs share: the preset where they have one, else data and partition.
        up: bytes of float32 tensors that a client sends in a round.
        accuracy: accuracy_personal over seeds, in percent; `last` is that of the last round.
    """

    setting: str
    method: str
    variant: str
    generator: str
    noise_dim: int
    up: int
    accuracy: Figure | None
    last: Figure | None


def traffic(runs: Iterable[RunRecord]) -> tuple[tuple[Traffic, ...], ...]:
    """Groups of two or more generators in one setting, each from the fewest bytes to the most."""
    groups: dict[str, dict[tuple[str, int, int], list[RunRecord]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        network = (run.network.generator, run.network.noise_dim, run.bytes_shared.up)
        groups[_shared_setting(run)][network].append(run)
    return tuple(
        tuple(_traffic(found[network]) for network in sorted(found, key=lambda network: network[2]))
        for _, found in sorted(groups.items())
        if len({network[0] for network in found}) > 1
    )


def _shared_setting(run: RunRecord) -> str:
    whole = {**RunSetting().published(), **run.setting}  # what a record does not name had its default
    setting = {name: value for name, value in whole.items() if name not in _FREE}
    reduced = {name: pair for name, pair in run.reduced.items() if name not in _FREE}
    return json.dumps([run.base, run.method, run.variant, setting, run.params, reduced], sort_keys=True, default=list)


def _traffic(runs: list[RunRecord]) -> Traffic:
    one = runs[0]
    named = one.base or f"{one.data}, {one.partition}"
    personal, last = (
        figure_of(value for run in runs if (value := run.figure(name)) is not None)
        for name in ("accuracy_personal", "accuracy_last")
    )
    return Traffic(
        setting=f"{named}, {one.network.split}, {one.rounds} rounds, {len(one.clients)} clients",
        method=one.method,
        variant=one.variant,
        generator=one.network.generator,
        noise_dim=one.network.noise_dim,
        up=one.bytes_shared.up,
        accuracy=personal,
        last=last,
    )
